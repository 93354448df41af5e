"""The event loop of the agent: waits for workers' messages and exits, signals and the clock."""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from functools import partial
from typing import Protocol

from engine.core.errors import required
from engine.core.history.process_records import ForkServerEndedRecord, ForkServerRecord
from engine.core.message_codec import Message
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.interrupts import Interrupts

_TICK_S = 0.25
_PATIENCE_S = 0.05  # for the descendants of a worker: large ones end slowly, and the others wait for this loop


class Supervised(Protocol):
    """The agent, as its event loop sees it."""

    members: dict[int, WorkerHandle]
    recorder: Recorder

    @property
    def due_s(self) -> float:
        """The time of the next deadline or late work."""

    def hear(self, member: WorkerHandle, message: Message) -> None:
        """Handles a message of a worker."""

    def sees_end(self, member: WorkerHandle) -> None:
        """Handles the sight of an end, before the last words of the worker."""

    def exited(self, member: WorkerHandle, code: int) -> None:
        """Handles the end of a worker, after its last words."""

    def interrupt(self, number: signal.Signals, step_grace_s: float) -> None:
        """Handles a signal to this process."""

    def look_at_deadlines(self) -> None:
        """Does the work that is due."""

    def look_at_clock(self) -> None:
        """Does the work of a tick."""

    def close(self) -> None:
        """Completes the records after the last end."""


def supervise(agent: Supervised, server: ForkServer, interrupts: Interrupts) -> None:
    """Runs until every worker has ended or is left behind."""
    watched: set[int] = set()
    server_pid = _look_at(server, agent, 0)
    with selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ, partial(_interrupted, agent, interrupts))
        ticked_s = 0.0
        while any(member.exit_code is None and not member.is_left_behind for member in agent.members.values()):
            for worker in agent.members.keys() - watched:  # at the start, and when one more was started
                _watch(selector, agent, agent.members[worker], server)
                watched.add(worker)
            wait_s = min(_TICK_S, agent.due_s - time.monotonic())
            for key, _ in selector.select(max(0.0, wait_s)):
                # An earlier handler of this round may have unregistered this source, or have emptied it.
                if selector.get_map().get(key.fd) is key:
                    with contextlib.suppress(BlockingIOError):
                        key.data()
            agent.look_at_deadlines()
            now_s = time.monotonic()
            if now_s - ticked_s >= _TICK_S:
                ticked_s = now_s
                agent.look_at_clock()
                server_pid = _look_at(server, agent, server_pid)
    agent.close()


def _interrupted(agent: Supervised, interrupts: Interrupts) -> None:
    agent.interrupt(interrupts.take(), interrupts.step_grace_s)


def _watch(selector: selectors.BaseSelector, agent: Supervised, member: WorkerHandle, server: ForkServer) -> None:
    def ended() -> None:
        agent.sees_end(member)
        _hear_last_words(agent, member)
        agent.exited(member, required(member.child.wait(), "a process whose pidfd is readable has ended"))
        for end in (member.link, member.child.pidfd):
            if end in selector.get_map():
                selector.unregister(end)
        member.release()
        server.end_descendants(_PATIENCE_S)

    def spoken() -> None:
        message = member.link.receive()
        if message is None:
            selector.unregister(member.link)
        else:
            agent.hear(member, message)

    selector.register(member.child.pidfd, selectors.EVENT_READ, ended)
    selector.register(member.link, selectors.EVENT_READ, spoken)


def _hear_last_words(agent: Supervised, member: WorkerHandle) -> None:
    """Handles the remaining messages of a worker that has ended, before its exit is handled.

    A process that the worker has started may hold the link open; the link is then empty, but not at its end.
    """
    with contextlib.suppress(BlockingIOError):
        while (message := member.link.receive()) is not None:
            agent.hear(member, message)


def _look_at(server: ForkServer, agent: Supervised, known: int) -> int:
    """Records the end of the `known` fork server and the start of another; returns the present pid, 0 for none."""
    now = 0 if server.has_ended() else server.pid
    if known not in (0, now):
        agent.recorder.write(ForkServerEndedRecord(child=known))
    if now not in (0, known):
        agent.recorder.write(ForkServerRecord(child=now))
    return now
