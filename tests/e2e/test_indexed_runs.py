"""A finite data set in real runs: whatever dies and however the model is cut, each pass has every sample once."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from engine.core.checks.trajectory import MARK_DIGITS, TrajectoryRow
from engine.core.job.job import Job
from engine.core.job.samples import sample_at
from engine.files.events_file import read_history
from engine.models.layers import Batch
from engine.report.load import load
from engine.report.tables import samples_table
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.worker.microbatches import mark_of
from tests.e2e.kill_runs import Runs
from tests.e2e.user_batches import NUM_POINTS, Points
from tests.kills import parse_kills
from tests.runtime.kept_states import run_and_keep
from tests.runtime.thread_runs import run_in_threads

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.usefixtures("shared_etcd")]

PASSES = 3
JOB: dict[str, Any] = {
    "model": "mlp",
    "model_args": {"width": 8, "depth": 3},
    "data": "tests.e2e.user_batches:points",
    "pipelines": 2,
    "microbatches": 2,
    "microbatch_size": 3,
    "steps": -(-PASSES * NUM_POINTS // 12),
    "validate_every": 0,
    "check_pure": False,
}


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    """Returns a runner of jobs."""
    return Runs(tmp_path_factory.mktemp("indexed"), server)


def loaded_marks(rows: list[TrajectoryRow]) -> dict[tuple[int, str], str]:
    """Returns the mark of each microbatch that was trained, by step and name."""
    found = {}
    for row in rows:
        names, marks = row.data
        for number, name in enumerate(names):
            found[row.step, name] = marks[number * MARK_DIGITS : (number + 1) * MARK_DIGITS]
    return found


def check_passes(table: pd.DataFrame, rows: list[TrajectoryRow]) -> None:
    """Holds a ledger against the data, and the bits that were trained against the ledger."""
    points, trained = Points(NUM_POINTS, 1), Counter[tuple[int, int]]()
    expected: dict[tuple[int, str], list[int]] = {}
    for row in table.itertuples():
        numbers = [sample_at(row.data_epoch, place, NUM_POINTS, 0) for place in range(row.first, row.first + row.count)]
        trained.update((row.data_epoch, number) for number in numbers)
        name = f"microbatch {row.microbatch} of pipeline {row.pipeline}"
        expected.setdefault((row.step, name), []).extend(numbers)
    assert all(trained[data_epoch, number] == 1 for data_epoch in range(PASSES) for number in range(NUM_POINTS))
    marks = loaded_marks(rows)
    assert marks.keys() == expected.keys()
    for at, numbers in expected.items():
        mark = mark_of(Batch((points.inputs[numbers],), (points.targets[numbers],)))
        half = MARK_DIGITS // 2
        assert marks[at] == mark[:half] + mark[MARK_DIGITS:][:half], at


@pytest.mark.parametrize(
    ("fields", "kills"),
    [
        ({"stages": 1}, ()),
        ({"stages": 2}, ("2:0:F:1", "5:1:B:0@1")),
        ({"stages": 3, "redundancy": "eager"}, ("3:2:B:1@1",)),
    ],
)
def test_every_pass_has_every_sample_once(runs: Runs, fields: dict[str, Any], kills: tuple[str, ...]) -> None:
    job = Job(**JOB, **fields)
    ending, events = runs.run(job, parse_kills(kills, job))
    assert ending.error is None, ending.error
    assert sum(event["event"] == "fault" for event in events) == len(kills)
    check_passes(load(read_history(runs.last / "events.jsonl")).samples, ending.view.run_state.rows)


def test_a_resumed_run_goes_on_in_the_same_pass_with_another_cut(tmp_path: Path) -> None:
    job = Job(**JOB, stages=2)
    whole, origins = run_and_keep(job, tmp_path)
    others = replace(job, stages=3, redundancy="eager"), replace(job, stages=4, workers=4)
    rows = [row for row in whole.view.run_state.rows if row.step <= 1]
    for origin, other, until in zip((origins[1], origins[5]), others, (5, job.steps), strict=True):
        ending = run_in_threads(other, parse_kills(("7:1",), other) if until == job.steps else (), origin=origin)
        assert ending.error is None, ending.error
        rows += [row for row in ending.view.run_state.rows if row.step <= until]
    check_passes(samples_table(job, {row.step for row in rows}, NUM_POINTS), rows)


def test_each_evaluation_set_is_measured_exactly_once_whatever_the_cut() -> None:
    fields: dict[str, Any] = JOB | {"data": "tests.e2e.user_batches:sets", "steps": 2, "validate_every": 1}
    whole = Job(**fields, stages=1, validation_microbatches=0, metrics="perplexity")
    cut = replace(whole, stages=3)
    by_sample = replace(whole, microbatches=6, microbatch_size=1)
    ending, of_cut, of_samples = (
        run_in_threads(job, parse_kills(("1:1",), job) if job is cut else ()) for job in (whole, cut, by_sample)
    )
    assert ending.error is None, ending.error
    measured = ending.view.run_state.validations
    assert of_cut.view.run_state.validations == measured
    assert [(each.name, each.samples) for each in measured[1]] == [("validation", 7), ("test", 5)]
    for one, other in zip(measured[1], of_samples.view.run_state.validations[1], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.metrics["perplexity"] == pytest.approx(math.exp(one.loss))
