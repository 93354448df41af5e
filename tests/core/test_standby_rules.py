"""Waiting workers and the policy are refused where no worker can take over single slots, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.core.job.partition import partition, smallest_stage
from engine.core.program.schedules import SCHEDULES


def refused(field: str = "standby", **fields: Any) -> list[str]:
    """Returns the problems with the waiting workers of a job, or with its policy."""
    asked = {"standby": 1} if field == "standby" else {"elastic": True}
    return [str(each) for each in check_job(Job(**asked, **fields)) if each.field == field]


def test_a_negative_number_is_refused() -> None:
    (problem,) = (str(each) for each in check_job(Job(standby=-1)) if each.field == "standby")
    assert problem == "standby: expected a whole number >= 0, found -1"


@pytest.mark.parametrize(("field", "off"), [("standby", "0"), ("elastic", "false")])
def test_shards_and_other_schedules_are_refused_all_at_once_with_the_reason(field: str, off: str) -> None:
    found = refused(field, pipelines=2, fsdp=1, redundancy="none", schedule="interleaved", stages_per_worker=2)
    assert len(found) == 3
    assert f"{off} with fsdp" in found[0] and "which keep their owners until one dies" in found[0]
    assert f"{off} with stages_per_worker 2" in found[1]
    assert f"{off} with schedule interleaved" in found[2] and "these take blocks: 1f1b, " in found[2]


@pytest.mark.parametrize("field", ["standby", "elastic"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_joiners_and_moves_need_a_schedule_that_takes_blocks(schedule: str, field: str) -> None:
    """The policy took the two stages of each worker apart at once, without a failure: steps took longer."""
    assert bool(refused(field, schedule=schedule)) != SCHEDULES[schedule].takes_blocks


def test_the_usual_schedules_take_blocks() -> None:
    assert SCHEDULES["1f1b"].takes_blocks and SCHEDULES["gpipe"].takes_blocks


def test_a_schedule_of_ones_own_is_refused() -> None:
    assert "a schedule of one's own" in refused(schedule="mine:plan")[0]


@pytest.mark.parametrize("form", ["uniform", "2,5", "1,3,4", "3"])
@pytest.mark.parametrize("num_layers", range(3, 14))
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
