"""The program of one step of a job before any failure."""

from __future__ import annotations

from functools import lru_cache

from engine.core.action import Program
from engine.core.config.job import Job
from engine.core.config.job_wants import fresh_ownership
from engine.core.ownership import Ownership, Redundancy
from engine.core.program.build import build_program


def initial_program(job: Job) -> tuple[Program, Ownership]:
    """Returns the program of one step of a job, and its ownership."""
    ownership = fresh_ownership(job)
    return _program(job.schedule, ownership, job.redundancy, job.log_every), ownership


@lru_cache(maxsize=8)  # the cells of a matrix that follow each other have few shapes
def _program(schedule: str, ownership: Ownership, redundancy: Redundancy, log_every: int) -> Program:
    return build_program(schedule, ownership, redundancy, log_every=log_every)
