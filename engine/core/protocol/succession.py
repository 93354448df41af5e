"""The successor of a coordinator that is lost with its host: it must account for the process of every worker.

Rules: a worker that the state names, and whose process no host holds, counts as ended: with its host if that is lost.
Before the first commit all workers begin again, on the hosts that are left: those that are there know too little, and
no step is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.core.errors import KILLED, CoordinatorUnavailableError
from engine.core.protocol.coordinator_state import CoordinatorState
from engine.core.protocol.state import State


class ProcessOnHost(NamedTuple):
    """A process of a worker on a host, by its number there; `ended` has its exit code, or is empty."""

    worker: int
    host: str
    number: int
    pid: int
    ended: tuple[int, ...] = ()


def restarts_all(before: CoordinatorState | None, *, has_results: bool) -> bool:
    """Returns whether all workers restart with the next host; `before` is the state in the store.

    `has_results`: a step was committed, perhaps one that was lost since.
    """
    if has_results or before is None:
        return not has_results
    return before.membership.committed == before.membership.options.begun


def succession(
    before: CoordinatorState | None, held: Mapping[str, Sequence[Sequence[int]]], lost: str, heard: int
) -> tuple[ProcessOnHost, ...]:
    """Returns the processes of a run whose coordinator was on host `lost`; `before` is its state in the store.

    `held` has each host's processes: number, worker, pid, and the exit code of one that has ended. `heard` is the last
    commit that a host left knows; the one after it is in the store. Raises CoordinatorUnavailableError if that is not
    enough.
    """
    if before is None or not before.started:
        raise CoordinatorUnavailableError(f"host {lost}, which coordinated the run, is lost before training resumed")
    state = before.membership
    if heard < state.committed - 1:
        why = f"and its results after step {heard} with it: step {state.committed} is committed"
        raise CoordinatorUnavailableError(f"host {lost}, which coordinated the run, is lost, {why}")
    by_worker = {
        worker: ProcessOnHost(worker, host, number, pid, tuple(ended))
        for host, processes in held.items()
        for number, worker, pid, *ended in processes
    }
    for worker in (*state.members, *state.waiting):
        if worker not in by_worker and worker not in state.exited:
            host = state.nodes.get(worker, lost)
            by_worker[worker] = ProcessOnHost(worker, host, -1 - worker, 0, (KILLED,) if host in held else ())
    return tuple(by_worker[worker] for worker in sorted(by_worker))


def last_number(state: State, processes: Iterable[ProcessOnHost]) -> int:
    """Returns the greatest number that a worker has or had, also one whose process is gone: a newcomer has none."""
    numbers = (*state.members, *state.waiting, *state.out, *state.lost, *state.exited)
    return max((*numbers, *(process.worker for process in processes)))
