"""Runs a job in this process that keeps a checkpoint of each step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.core.checkpoint_rules import Resumption
from engine.core.job.job import Job
from engine.core.monitors import NO_MONITORS
from engine.files.checkpoint_folder import checkpoints_at
from engine.runtime.agent.run_state import Ending
from tests.runtime.thread_runs import run_in_threads


def keeping_all(job: Job, place: Path) -> Job:
    """Returns a job that keeps a checkpoint of each step in a folder."""
    return replace(job, checkpoint_every="1", keep=job.steps, checkpoints=str(place))


def kept_states(job: Job, ending: Ending, place: Path, first: int = 0) -> list[Resumption]:
    """Returns a checkpoint of each step of a run that has ended, from step `first` on.

    The step before a death is kept: its parts are ordered once more. Older ones may wait for the disk and die.
    """
    assert (ending.outcome, ending.error) == ("finished", None)
    folder, run_state = checkpoints_at(place), ending.view.run_state
    names = [each for each in folder.names() if each.step >= first]
    assert [each.step for each in names] == list(range(first, run_state.committed + 1)), run_state.notes
    known = [folder.manifest(each).monitors or NO_MONITORS for each in names]
    return [
        Resumption(each.step, str(place), each.file, monitors=monitors)
        for each, monitors in zip(names, known, strict=True)
    ]


def run_and_keep(job: Job, place: Path) -> tuple[Ending, list[Resumption]]:
    """Runs a job to its end; returns that, and a checkpoint of each step."""
    ending = run_in_threads(keeping_all(job, place))
    return ending, kept_states(job, ending, place)
