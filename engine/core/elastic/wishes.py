"""Wishes: the wanted owners of an elastic job, for members that the policy has not been asked about yet.

Rule: the host of the coordinator asks at a tick of the clock: no verdict and no commit must wait for the search.
"""

from __future__ import annotations

from engine.core.config.job import Job
from engine.core.elastic.assignment import assign
from engine.core.elastic.rebalancing import Rebalancing, after_assignment, is_due
from engine.core.membership.events import Wanted
from engine.core.membership.state import Phase, State
from engine.core.ownership import Ownership


def wish(asked: Rebalancing, job: Job, known: State, now_ns: int) -> tuple[Rebalancing, Wanted | None]:
    """Returns the members that the policy was asked about, and other wanted owners if it has them."""
    workers = tuple(worker for worker in known.members if worker not in known.leaving)
    if known.phase is not Phase.RUNNING or not workers or not is_due(asked, known.committed, workers, {}):
        return asked, None
    ownership = Ownership(job.grid, known.owners, known.shadows)
    whole = {worker: ownership.held_by(worker) for worker in workers}
    found = assign(ownership, workers, whole=whole, redundancy=job.redundancy, level=job.redundancy_level)
    new = after_assignment(asked, known.committed, workers, {}, known.owners, found)
    return new, Wanted(now_ns, found.owners, found.why) if found.owners != known.owners else None
