"""The first program of a job: what every worker does in a step while nobody has failed."""

from __future__ import annotations

from engine.core.job import Job
from engine.core.ownership import Grid, Ownership, one_slot_each, with_shadows
from engine.core.program import Program, build_program


def planned(job: Job) -> tuple[Program, Ownership]:
    """Returns the program of one step of a job, and who owns and shadows what."""
    ownership = one_slot_each(Grid(job.stages, job.microbatches, job.pipelines))
    ownership = with_shadows(ownership, job.redundancy, job.redundancy_level, ownership.workers())
    return build_program(job.schedule, ownership, job.redundancy), ownership
