"""Runs a job in this process that keeps a checkpoint of each step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.core.checkpoints.resumption import Resumption
from engine.core.config.job import Job
from engine.files.checkpoints.checkpoint_folder import checkpoints_at
from engine.runtime.agent.run_view import Ending
from tests.runtime.thread_runs import run_in_threads


def run_and_keep(job: Job, place: Path) -> tuple[Ending, list[Resumption]]:
    """Runs a job to its end; returns that, and a checkpoint of each step."""
    ending = run_in_threads(replace(job, checkpoint_every="1", keep=job.steps, checkpoints=str(place)))
    assert (ending.outcome, ending.error) == ("finished", None)
    names = checkpoints_at(place).names()
    assert [each.step for each in names] == list(range(job.steps))
    return ending, [Resumption(each.step, str(place), each.file) for each in names]
