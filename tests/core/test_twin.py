"""The twin of a job, the name of its trajectory, and the comparison with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.core.checks.trajectory import TrajectoryRow
from engine.core.checks.twin import BUILT_IN_DATA, compare, fingerprint, twin_of
from engine.core.config.job import Job
from engine.core.config.job_rules import check_job
from engine.models.model_registry import DATA

ROWS = [TrajectoryRow(step, layer, f"{step}{layer}" * 32, "0" * 64, 1.5) for step in range(3) for layer in range(2)]
FACTS: dict[str, object] = {
    "python": "3.11",
    "torch": "2",
    "machine": "x86_64",
    "cpu": "a",
    "isa": ["avx2"],
    "host": "h",
}


def test_the_twin_has_no_redundancy_and_the_same_bits() -> None:
    job = Job(redundancy="eager", redundancy_level=2, log_every=2, validate_every=7, seed=3, threads=2)
    assert twin_of(job) == Job(redundancy="none", check_pure=False, validate_every=0, seed=3, threads=2, results="")
    assert check_job(twin_of(job)) == []


def test_runs_that_differ_in_no_bit_have_one_twin() -> None:
    name = fingerprint(Job(), FACTS, "s")
    assert name is not None
    for same in (Job(redundancy="eager"), Job(name="x", results="y", validate_every=0), Job(check_pure=False)):
        assert fingerprint(same, FACTS, "s") == name
    assert fingerprint(Job(), FACTS | {"host": "other"}, "s") == name


@pytest.mark.parametrize(
    "changed", [{"seed": 1}, {"threads": 2}, {"steps": 81}, {"audit": 2}, {"stages": 2}, {"model_args": {"width": 8}}]
)
def test_whatever_may_change_a_row_changes_the_name(changed: dict[str, Any]) -> None:
    assert fingerprint(replace(Job(), **changed), FACTS, "s") != fingerprint(Job(), FACTS, "s")


@pytest.mark.parametrize("name", ["python", "torch", "machine", "cpu", "isa"])
def test_another_host_or_program_has_another_name(name: str) -> None:
    assert fingerprint(Job(), FACTS | {name: "other"}, "s") != fingerprint(Job(), FACTS, "s")
    assert fingerprint(Job(), FACTS, "t") != fingerprint(Job(), FACTS, "s")


@pytest.mark.parametrize("job", [Job(model="mine:make"), Job(data="a.txt"), Job(data="mine:data"), Job(data="mnist")])
def test_what_a_user_may_edit_has_no_name(job: Job) -> None:
    assert fingerprint(job, FACTS, "s") is None


def test_built_in_data_are_those_of_the_catalogue() -> None:
    assert {*DATA, "auto"} == BUILT_IN_DATA


def test_equal_rows_are_compared_step_by_step() -> None:
    found = compare(ROWS, reversed(ROWS))
    assert (found.num_steps, found.last_step, found.difference) == (3, 2, None)


def test_steps_that_only_one_has_are_not_compared() -> None:
    found = compare([row for row in ROWS if row.step != 1], ROWS[:-2])
    assert (found.num_steps, found.last_step, found.difference) == (1, 0, None)
    assert compare([], ROWS).num_steps == 0
    assert compare([], ROWS).last_step == -1


def test_a_difference_is_named_with_its_step_and_layer() -> None:
    found = compare([*ROWS[:3], replace(ROWS[3], state="ff"), *ROWS[4:]], ROWS)
    assert found.difference == f"step 1, layer 1: state differs, ff in this run and {'11' * 32} in its twin"
