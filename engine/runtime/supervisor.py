"""The launcher's loop: waits on the workers' links, their pidfds, the fork server, signals and the clock at once."""

from __future__ import annotations

import contextlib
import selectors
import signal
import time

from engine.core.errors import InvariantError
from engine.runtime.agent import Agent
from engine.runtime.children import ForkServer
from engine.runtime.hearing import hear
from engine.runtime.interrupts import Interrupts
from engine.runtime.roster import Member

_TICK_S = 0.25


def supervise(agent: Agent, server: ForkServer, interrupts: Interrupts) -> None:
    """Serves until every worker has ended; afterwards the agent says how it went."""
    members = list(agent.members.values())
    with selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ, lambda: agent.interrupt(interrupts.take()))
        selector.register(server.link, selectors.EVENT_READ, lambda: _note_exit(selector, agent, server))
        _watch_store(selector, agent)
        for member in members:
            _watch(selector, agent, member)
        ticked_s = 0.0
        while any(member.exit_code is None for member in members):
            while server.has_early_exits():
                _note_exit(selector, agent, server)
            due_s = min(agent.deadline_s, agent.injector.due_ns / 1e9)
            wait_s = min(_TICK_S, due_s - time.monotonic())
            for key, _ in selector.select(max(0.0, wait_s)):
                # What was ready may have been dealt with by what came before it in this round.
                if key.fd in selector.get_map():
                    with contextlib.suppress(BlockingIOError):
                        key.data()
            agent.injector.look_at_clock()
            now_s = time.monotonic()
            if now_s >= agent.deadline_s:
                agent.overdue()
            if now_s - ticked_s >= _TICK_S:
                ticked_s = now_s
                agent.look_at_clock()
    agent.close()


def _watch(selector: selectors.BaseSelector, agent: Agent, member: Member) -> None:
    def ended() -> None:
        selector.unregister(member.child.pidfd)
        agent.sees_end(member)
        _hear_last_words(agent, member)

    def spoken() -> None:
        message = member.link.receive()
        if message is None:
            selector.unregister(member.link)
        else:
            hear(agent, member, message)

    selector.register(member.child.pidfd, selectors.EVENT_READ, ended)
    selector.register(member.link, selectors.EVENT_READ, spoken)


def _hear_last_words(agent: Agent, member: Member) -> None:
    """Takes in what a worker said before it ended, which comes before its end, whoever told of that first.

    Something that it started itself may still hold its link open: then nothing is left to receive, which is no end.
    """
    with contextlib.suppress(BlockingIOError):
        while (message := member.link.receive()) is not None:
            hear(agent, member, message)


def _watch_store(selector: selectors.BaseSelector, agent: Agent) -> None:
    def ended() -> None:
        selector.unregister(child.pidfd)
        if agent.replaces_store():
            _watch_store(selector, agent)

    child = agent.store.child
    agent.recorder.event("rendezvous", child=child.pid, port=agent.store.port)
    selector.register(child.pidfd, selectors.EVENT_READ, ended)


def _note_exit(selector: selectors.BaseSelector, agent: Agent, server: ForkServer) -> None:
    """The fork server reports how a child ended."""
    message = server.next_exit()
    if message is None:
        for member in agent.members.values():
            member.exit_code = -signal.SIGKILL if member.exit_code is None else member.exit_code
        agent.fail(InvariantError("the fork server has ended, and with it every worker"))
        return
    for member in agent.members.values():
        if member.child.pid == message["pid"] and member.exit_code is None:
            _hear_last_words(agent, member)
            agent.exited(member, message["code"])
            for end in (member.link, member.child.pidfd):
                if end in selector.get_map():
                    selector.unregister(end)
            member.release()
