"""The ownership that a job asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from engine.core.config.job import Job
from engine.core.ownership import Ownership, fresh, with_shadows
from engine.core.schedules.placement_choice import placement_of


def fresh_ownership(job: Job) -> Ownership:
    """Returns the ownership of a job before any failure."""
    placement = placement_of(job.schedule, job.placement)
    ownership = fresh(job.grid, job.stages_per_worker, placement)
    if job.workers:  # neighbours together: the fewest transfers
        owners = tuple(each * job.workers // job.most_workers for each in ownership.owners)
        ownership = replace(ownership, owners=owners)
    return shadowed(job, ownership, ownership.workers())


def known_ownership(job: Job) -> Ownership | None:
    """Returns the ownership of a job before any failure; None if the placement is that of a generator not called."""
    if job.has_program:
        return fresh_ownership(job)
    if job.stages_per_worker > 1 and job.placement == "auto":
        return None
    return fresh_ownership(replace(job, schedule=Job().schedule))  # any schedule has this placement


def shadowed(
    job: Job, ownership: Ownership, members: Collection[int], host_of: Mapping[int, str] | None = None
) -> Ownership:
    """Returns the ownership with the shadows that the policy of the job asks for; on several hosts all are new."""
    if host_of and len(set(host_of.values())) > 1:
        bare = replace(ownership, shadows=())
        return with_shadows(bare, job.redundancy, job.redundancy_level, members, host_of=host_of)
    return with_shadows(ownership, job.redundancy, job.redundancy_level, members)


def holders(job: Job) -> list[frozenset[int]]:
    """Returns for each slot of a pipeline the workers that hold its state at the start, in any pipeline.

    With shards each pipeline has its own state, and all of them stand one after the other.
    """
    ownership = fresh_ownership(job)
    if job.fsdp:
        return [frozenset(ownership.replicas(*slot)) for slot in job.grid.slots()]
    return [
        frozenset(worker for pipeline in range(job.pipelines) for worker in ownership.replicas(pipeline, stage))
        for stage in range(job.slots)
    ]
