"""Waiting workers: they have code and data, and no slot, rank or vote; an epoch makes them members.

Rules: the group of a verdict takes all of them in, because it is formed anyway. `State.joiners` come in at a step
boundary, too: their group is formed before it (`engine/core/coordinator/next_group.py`), and the epoch is prepared.
One whose memory does not suffice for a slot is cramped: it waits on, until the agent of its host says otherwise.
Before training and after the last commit they have no use. The loss of a waiting worker is no epoch. Its number, as
that of each worker that was lost, is never used again.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.exclusion import Cause, Exclusion, excluded
from engine.core.membership.state import State


def is_unknown(state: State, worker: int) -> bool:
    """Returns whether a worker is neither a member nor waiting, nor was ever one or lost."""
    return not any(worker in known for known in (state.members, state.waiting, state.out, state.lost, state.exited))


def loses(state: State, gone: Iterable[Exclusion]) -> State:
    """Returns the state without waiting workers that are lost; no member learns of it."""
    lost = {each.worker: each for each in gone}
    waiting = tuple(worker for worker in state.waiting if worker not in lost)
    cramped = {worker: why for worker, why in state.cramped.items() if worker not in lost} if state.cramped else {}
    return state._replace(waiting=waiting, cramped=cramped, lost={**state.lost, **lost}) if lost else state


def loses_silent(state: State, now_ns: int) -> State:
    """Returns the state without waiting workers that have not answered for too long."""
    if not state.waiting:
        return state
    late = {worker: now_ns - state.sightings[worker].heard_ns for worker in state.waiting}
    return loses(
        state,
        [
            excluded(worker, Cause.SILENCE, f"has been silent for {silent_ns / 1e9:.1f} s")
            for worker, silent_ns in late.items()
            if silent_ns > state.options.waiting_ns
        ],
    )
