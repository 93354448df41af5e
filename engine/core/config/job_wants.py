"""What a job wants: who owns and shadows what, and what is due after a step."""

from __future__ import annotations

from collections.abc import Collection

from engine.core.config.job import Job
from engine.core.ownership import Grid, Ownership, fresh, with_shadows
from engine.core.schedules.placement_choice import placement_of


def fresh_ownership(job: Job) -> Ownership:
    """Returns who owns and shadows what while nobody has failed."""
    placement = placement_of(job.schedule, job.placement)
    ownership = fresh(Grid(job.stages, job.microbatches, job.pipelines), job.stages_per_worker, placement)
    return shadowed(job, ownership, ownership.workers())


def shadowed(job: Job, ownership: Ownership, members: Collection[int], leaving: Collection[int] = ()) -> Ownership:
    """Returns an ownership with the shadows that a job wants among these members."""
    return with_shadows(ownership, job.redundancy, job.redundancy_level, members, leaving)


def is_due(every: int, step: int, is_last: bool) -> bool:
    """Says whether what a job wants every so many steps, 0 for never, follows on this one; on the last one always."""
    return every > 0 and ((step + 1) % every == 0 or is_last)
