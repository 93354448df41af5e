"""The rule of equal ends, and survivable exceptions: when the cause is the user's code, and not a worker.

Rules: a second worker that hangs, or exits with the same code, in the action in which another one did, shows that the
cause is the user's code: it would end one heir after the other. So does the same exception of a second worker in the
same step. A worker that an injected fault struck does not count. An error of a GPU is a loss like any death, also of a
worker without an heir. Several GPUs may fail at once, as behind one switch; but an heir whose GPU has the same trouble
with the same slots shows that a kernel of the model is the cause. After the last commit no exception ends the run:
every step is committed, and only results of the last step can be lost.
"""

from __future__ import annotations

from engine.core.action import COMPUTE_OPS, Action, parse_action
from engine.core.coordinator.outputs import Note, Stop
from engine.core.coordinator.state import CoordinatorState, Raised
from engine.core.errors import ScheduleError
from engine.core.exclusion import Cause, Exclusion
from engine.core.membership.verdicts import heirs
from engine.core.messages import RaisedMessage
from engine.core.texts import numbered
from engine.core.worker_exception import GPU_ERROR

_PUT_OUT = (Cause.HANG, Cause.SILENCE, Cause.NO_ANSWER)  # of workers whose processes live


def survives(state: CoordinatorState, worker: int, raised: RaisedMessage) -> tuple[CoordinatorState, bool]:
    """Returns the state after an exception of a worker, and whether the run goes on without the worker."""
    exception, membership = raised.exception, state.membership
    slots = tuple(slot for slot, owner in enumerate(membership.owners) if owner == worker)
    entry = Raised(raised.step, exception.kind, exception.in_verdict(), slots if exception.gpu else None)
    is_known = not exception.is_injected and any(_is_the_same(entry, each) for each in state.raised.values())
    is_device = exception.gpu.startswith(GPU_ERROR)
    can_go_on = membership.is_over or (not is_known and (is_device or not heirs(membership, (worker,)).lost))
    return state._replace(raised={**state.raised, worker: entry}), can_go_on


def _is_the_same(entry: Raised, before: Raised) -> bool:
    """Returns whether two exceptions have one cause; of GPUs only if the second worker is an heir of the first."""
    if (entry.step, entry.kind) != (before.step, before.kind):
        return False
    return entry.of_gpu is None or before.of_gpu is None or not set(entry.of_gpu).isdisjoint(before.of_gpu)


def repeated(state: CoordinatorState) -> Stop | None:
    """Returns the end of the run if two workers ended in the same way in the same action."""
    first: dict[tuple[str, int, Action], int] = {}
    for out in state.membership.out.values():
        end, at = _end_of(state, out), _action_of(state, out.worker)
        if end and at is not None and not state.places[out.worker].is_struck:
            other = first.setdefault((end, *at), out.worker)
            if other != out.worker:
                same = f"worker {out.worker} {out.how}{_where(state, out.worker)}, as worker {other} did"
                return Stop(f"{same}: it comes from the user's code, not from a worker", stage=at[1].stage)
    return None


def put_out(state: CoordinatorState, owners: tuple[int, ...]) -> list[Note]:
    """Returns the notes on the workers that the verdict puts out while their processes live.

    `owners` are those before the verdict.
    """
    notes = []
    for out in state.membership.verdict:
        if out.cause in _PUT_OUT:
            places = [place for place, owner in enumerate(owners) if owner == out.worker]
            inherited = {state.membership.owners[place] for place in places} - {out.worker}
            verb = "takes" if len(inherited) == 1 else "take"
            then = f"; {numbered('worker', sorted(inherited), ' and ')} {verb} over" if inherited else ""
            notes.append(Note(f"worker {out.worker} {out.how}{_where(state, out.worker)} and is put out{then}"))
    return notes


def _end_of(state: CoordinatorState, out: Exclusion) -> str:
    code = state.codes.get(out.worker, -1)
    if out.cause is Cause.DEATH and code >= 0:  # signals come from outside
        return f"exit code {code}"
    return "hang" if out.cause is Cause.HANG else ""


def _action_of(state: CoordinatorState, worker: int) -> tuple[int, Action] | None:
    """Returns the step and the compute action in which a worker ended; None in any other action."""
    place = state.places.get(worker)
    if place is None:
        return None
    try:
        action = parse_action(place.action)
    except ScheduleError:  # it had begun none
        return None
    return (place.step, action) if action.op in COMPUTE_OPS else None


def _where(state: CoordinatorState, worker: int) -> str:
    at = _action_of(state, worker)
    return f" in {at[1]} of step {at[0]}" if at else ""
