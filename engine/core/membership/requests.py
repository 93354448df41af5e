"""The rules of requests, which are met later: a worker waits to become a member or leaves, the job ends, slots move.

One rule more is about memory, for which a worker must wait.
"""

from __future__ import annotations

from engine.core.errors import ExitCode, ensure
from engine.core.exclusion import Cause, excluded
from engine.core.membership import events
from engine.core.membership.events import Heard
from engine.core.membership.failure_detector import alive
from engine.core.membership.rule import rule
from engine.core.membership.state import Phase, State
from engine.core.membership.verdicts import halted
from engine.core.membership.waiting import is_unknown, loses
from engine.core.messages import WaitingMessage


@rule()
def waits(state: State, event: Heard[WaitingMessage]) -> State:
    """Records that a worker waits to become a member; it may have become one, or be lost, when this is read again."""
    if event.worker in (*state.members, *state.waiting):
        return alive(state, event.worker, event.now_ns)
    if not is_unknown(state, event.worker):
        return state
    new = alive(state, event.worker, event.now_ns)
    eager = (*state.eager, event.worker) if event.message.joins else state.eager
    waiting, nodes = (*state.waiting, event.worker), {**state.nodes, event.worker: event.node}
    return new._replace(waiting=waiting, eager=eager, nodes=nodes)


@rule()
def leaves(state: State, event: events.Notice) -> State:
    """Records that a worker will hand over at the next boundary, or that the job ends after the running step.

    A job that ends has no use for those that wait: they need not wait for the end of a long step.
    """
    if event.worker is None:
        running = state.committed + (state.phase is not Phase.RECONFIGURING)  # at a boundary no step is running
        free = [excluded(worker, Cause.LEFT, "was let go, because the run ends") for worker in state.waiting]
        return loses(state._replace(last_step=min(state.last_step, running)), free)
    if event.worker in state.waiting or is_unknown(state, event.worker):
        return loses(state, [excluded(event.worker, Cause.LEFT, "has left while it waited")])
    if event.worker not in state.members or event.worker in state.leaving:
        return state
    return state._replace(leaving=(*state.leaving, event.worker))


@rule(Phase.HALTED)
def leaves_early(state: State, event: events.Notice) -> State:
    """Halts a job that is told to stop before its first step."""
    if event.worker is None:
        return halted(state, ExitCode.TERMINATED, "the job was stopped before training began")
    return leaves.decide(state, event)


@rule()
def must_wait(state: State, event: events.Cramped) -> State:
    """Records who must wait for memory; a worker may be named before it waits."""
    free = {*state.members, *state.lost, *state.out, *state.exited}
    return state._replace(cramped={worker: why for worker, why in event.workers.items() if worker not in free})


@rule()
def wants(state: State, event: events.Wanted) -> State:
    """Records the wanted owners; the slots move at step boundaries, as soon as these hold whole replicas."""
    ensure(len(event.owners) in (0, len(state.owners)), f"{len(event.owners)} owners for {len(state.owners)} slots")
    new = state._replace(wanted=event.owners, wanted_why=event.why)
    if not (new.wanted_moves or new.awaits_joiners):
        new = new._replace(wanted=(), wanted_why="")
    if not state.awaits_inventories:
        return new
    return new._replace(wanted_at_start=new.wanted if new.wanted_moves else ())  # it goes out with the plan
