"""The program of one step of a job before any failure."""

from __future__ import annotations

from engine.core.action import Program
from engine.core.config.job import Job
from engine.core.config.job_wants import fresh_ownership
from engine.core.ownership import Ownership
from engine.core.program.build import build_program


def initial_program(job: Job) -> tuple[Program, Ownership]:
    """Returns the program of one step of a job, and its ownership."""
    ownership = fresh_ownership(job)
    return build_program(job.schedule, ownership, job.redundancy, log_every=job.log_every, fsdp=job.fsdp), ownership
