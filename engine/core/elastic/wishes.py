"""Wishes: the wanted owners of an elastic job, when the policy is due to be asked.

Rules: the host of the coordinator asks at a tick of the clock: no verdict and no commit must wait for the search. It
asks at a verdict, too, that takes workers in, while all members count their inventories: so these get their slots with
the plan of that epoch, and become shadows in the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.core.config.job import Job
from engine.core.elastic.assignment import assign
from engine.core.elastic.rebalancing import Rebalancing, after_assignment, is_due, is_worth_it
from engine.core.elastic.slow_workers import members_only, speeds
from engine.core.elastic.worker_times import WorkerTimes, are_settled, facts
from engine.core.membership.events import Wanted
from engine.core.membership.state import Phase, State
from engine.core.ownership import Ownership


class Wish(NamedTuple):
    """What the policy was asked about, its answer in words, and the wanted owners if they are others."""

    asked: Rebalancing
    why: str = ""  # empty if it was not asked
    wanted: Wanted | None = None


def wish(
    asked: Rebalancing,
    job: Job,
    known: State,
    now_ns: int,
    times: WorkerTimes | None = None,
    free_bytes: Callable[[], int | None] = lambda: None,
    *,
    takes_in: bool = False,
) -> Wish:
    """Asks the policy if that is due; `free_bytes` are those of the host of all workers, as far as they are known.

    `takes_in`: a verdict has just taken workers in, and the document of its plan is not made.
    """
    times = times or WorkerTimes()
    staying = tuple(worker for worker in known.members if worker not in known.leaving)
    workers = (*staying, *known.joiners) if staying else ()
    slow, settled = speeds(members_only(times.paces, workers)), are_settled(times, job.slots)
    if not (known.phase is Phase.RUNNING or (takes_in and known.awaits_inventories)) or not workers:
        return Wish(asked)
    if not is_due(asked, known.committed, workers, slow, knows_times=settled):
        return Wish(asked)
    ownership = Ownership(job.grid, known.owners, known.shadows)
    whole = {worker: ownership.held_by(worker) for worker in workers}
    measured = facts(times, job, ownership, workers, known.nodes, free_bytes())
    found = assign(ownership, workers, measured, whole, job.redundancy, job.redundancy_level)
    why, owners, going_on = found.why, found.owners, known.wanted or known.owners
    # A wish that is carried out goes on: a leaver must lose its slots, and a joiner get them.
    may_go_on = {*going_on} <= {*workers} and owners not in (known.owners, going_on)
    if may_go_on and not is_worth_it(asked, workers, slow, found):
        why, owners = f"nothing moves, because the times of few steps are noisy; else {why}", going_on
    is_news = owners != going_on
    moves = is_news and owners != known.owners
    new = after_assignment(asked, known.committed, workers, slow, moves=moves, knows_times=settled)
    return Wish(new, why, Wanted(now_ns, owners, why) if is_news else None)
