"""The first program of a job: what every worker does in a step while nobody has failed."""

from __future__ import annotations

from engine.core.job import Job
from engine.core.ownership import Grid, Ownership, fresh, with_shadows
from engine.core.program import Program, build_program
from engine.core.schedules.choice import placement_of


def fresh_ownership(job: Job) -> Ownership:
    """Returns who owns and shadows what while nobody has failed."""
    placement = placement_of(job.schedule, job.placement)
    ownership = fresh(Grid(job.stages, job.microbatches, job.pipelines), job.stages_per_worker, placement)
    return with_shadows(ownership, job.redundancy, job.redundancy_level, ownership.workers())


def planned(job: Job) -> tuple[Program, Ownership]:
    """Returns the program of one step of a job, and who owns and shadows what."""
    ownership = fresh_ownership(job)
    return build_program(job.schedule, ownership, job.redundancy), ownership
