"""The needs of a kind of fault of a job: files of checkpoints, a GPU or its double."""

from __future__ import annotations

from collections.abc import Iterator

from engine.core.checkpoints.keeping import Keeping, keeping_of
from engine.core.config.job import Job
from engine.core.errors import Problem
from engine.core.faults.fault_kind import DOUBLE, ON_DISKS, ON_GPUS, WITHOUT_GPU, Parameters


def kind_problems(kind: str, parameters: Parameters, job: Job) -> Iterator[Problem]:
    """Yields the problems of a kind with these parameters in a job in which it can have no effect."""
    if kind in ON_DISKS and keeping_of(job.checkpoint_every) == Keeping(last=False):
        hint = "no checkpoint is written there: set checkpoint_every in the job"
        yield Problem("do", "a kind for a job that keeps checkpoints", repr(kind), hint)
    yield from gpu_problems(kind, parameters, job)


def gpu_problems(kind: str, parameters: Parameters, job: Job) -> Iterator[Problem]:
    """Yields the problem of a fault of a GPU in a job without GPUs and without their double."""
    if kind in ON_GPUS and job.device != "cuda" and parameters.get(WITHOUT_GPU) != DOUBLE:
        hint = f"its workers compute on the CPU: with {WITHOUT_GPU}: {DOUBLE} a worker plays its GPU"
        yield Problem("do", "a kind for a job on GPUs", repr(kind), hint)
