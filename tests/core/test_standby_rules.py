"""Waiting workers and the policy: refused values, schedules that take them, and the layers of the smallest stage."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.core.job.partition import partition, smallest_stage
from engine.core.ownership import directions_of
from engine.core.program.schedules import SCHEDULES
from tests.looped import looped


def test_a_negative_number_is_refused() -> None:
    (problem,) = (str(each) for each in check_job(Job(standby=-1)) if each.field == "standby")
    assert problem == "standby: expected a whole number >= 0, found -1"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"max_workers": 3}, "expected a whole number >= 4, found 3 (the job starts with 4 workers)"),
        (
            {"max_workers": 9, "blocks": 2},
            "expected a whole number <= 8, found 9 (a worker owns at least one block, and there are 4 stages of 2 "
            "blocks)",
        ),
        (
            {"max_workers": 9, "pipelines": 2},
            "expected a whole number <= 8, found 9 (a worker owns at least one stage, and each of the 2 pipelines has "
            "4 stages)",
        ),
        (
            {"max_workers": 4, "elastic": False},
            "expected 0 without elastic, found 4 (no stage moves to a worker that joins: give --elastic)",
        ),
        ({"max_workers": -1}, "expected a whole number >= 0, found -1"),
        ({"max_workers": 5000}, "expected a whole number <= 4096, found 5000"),
        ({"max_workers": 8, "blocks": 2}, ""),
    ],
)
def test_the_most_workers_can_all_own(fields: dict[str, Any], problem: str) -> None:
    job = Job(**{"elastic": True, **fields})
    assert [str(each) for each in check_job(job)] == ([f"max_workers: {problem}"] if problem else [])


@looped("schedule", SCHEDULES)
def test_workers_may_join_under_every_schedule(schedule: str) -> None:
    known, ways = SCHEDULES[schedule], directions_of(schedule)
    sizes: dict[str, Any] = {"stages_per_worker": known.stages_per_worker[0], "microbatches": 8, "standby": 1}
    assert check_job(Job(schedule=schedule, stages=8, pipelines=2, elastic=True, blocks=2, **sizes)) == []
    if ways == 1:
        shards: dict[str, Any] = {**sizes, "fsdp": 1, "pipelines": 2}
        assert check_job(Job(schedule=schedule, stages=8, elastic=True, blocks=2, **shards)) == []


@looped("form", ["uniform", "2,5", "1,3,4", "3"])
@looped("num_layers", range(3, 14))
def test_the_smallest_stage_is_that_of_the_cut(form: str, num_layers: int) -> None:
    num_stages = 3 if form == "uniform" else form.count(",") + 2
    found = smallest_stage(form, num_stages, num_layers)
    try:
        partition(form, num_stages, ["Layer"] * num_layers, (), 1)
    except UserError:
        assert found is None
        return
    assert found is not None
    partition(form, num_stages, ["Layer"] * num_layers, (), found)
    with pytest.raises(UserError):
        partition(form, num_stages, ["Layer"] * num_layers, (), found + 1)


@pytest.mark.parametrize("form", ["parameters", "profile", "type:Block", "nonsense"])
def test_weights_of_layers_decide_where_the_launcher_does_not_know(form: str) -> None:
    assert smallest_stage(form, 3, 12) is None
