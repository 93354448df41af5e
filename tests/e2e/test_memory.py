"""The residuals that a stage keeps for its backwards, as counted by the worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.core.job.job import Job
from engine.core.ownership import Grid, fresh
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.runtime.agent.run_state import Ending

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]

P, M = 4, 6


def measured(train: Callable[..., Ending], schedule: str) -> dict[int, int]:
    """Returns the peak number of residuals of each stage."""
    ending = train(Job(model="mlp", stages=P, microbatches=M, steps=2, schedule=schedule, validate_every=1))
    assert all(each.peak_memory_kib > 0 for each in ending.view.workers)
    return {each.slots[0][1]: each.peak_stash for each in ending.view.workers}


def predicted(schedule: str) -> dict[int, int]:
    ownership = fresh(Grid(P, M))
    return dry_run(build_program(schedule, ownership), ownership).peak_stash


def test_1f1b_keeps_at_most_as_many_microbatches_as_stages_are_left(train: Callable[..., Ending]) -> None:
    peaks = measured(train, "1f1b")
    assert all(peaks[stage] <= P - stage for stage in range(P))
    assert peaks == predicted("1f1b")


def test_eager_1f1b_keeps_one_more_for_each_hop_to_the_last_stage(train: Callable[..., Ending]) -> None:
    peaks = measured(train, "eager-1f1b")
    assert peaks == {stage: min(M, P - stage + P - stage - 1) for stage in range(P)} == predicted("eager-1f1b")


def test_gpipe_keeps_all_microbatches(train: Callable[..., Ending]) -> None:
    peaks = measured(train, "gpipe")
    assert peaks == dict.fromkeys(range(P), M) == predicted("gpipe")
