"""Blocks change no bit: each layer has its trajectory of one block and of a plain loop, also after a kill in a run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from engine.core.checks.trajectory import TrajectoryRow, first_difference
from engine.core.job.job import Job
from tests.e2e.plain_loop import train as train_plainly
from tests.kills import parse_kills
from tests.runtime.thread_runs import run_in_threads

pytestmark = pytest.mark.timeout(300)

_SMALL: dict[str, Any] = {
    "stages": 2,
    "microbatches": 3,
    "microbatch_size": 2,
    "steps": 2,
    "validate_every": 0,
    "check_pure": False,
}
GPT = Job(model_args={"width": 16, "heads": 2, "depth": 6, "tied": True, "dropout": 0.1}, **_SMALL)
RESNET = Job(model="resnet18", model_args={"width": 4}, **_SMALL)
JOBS = {"gpt": GPT, "resnet18": RESNET}
# The other fields of a job, and a kill; the second block of four and the sixth stand inside of a run.
EXACT: dict[str, tuple[dict[str, Any], str]] = {
    "lazy": ({"blocks": 4}, "1:5"),
    "two blocks": ({"blocks": 2}, "1:1:F:1"),
    "first of a run": ({"blocks": 4}, "1:4:F:2"),
    "gpipe": ({"blocks": 4, "schedule": "gpipe"}, "1:2:B:1"),
    "eager": ({"blocks": 4, "redundancy": "eager"}, "1:5:B:1"),
    "streamed": ({"blocks": 2, "log_every": 1}, "1:3:B:2"),
    "recomputed": ({"blocks": 2, "activation_checkpoint": 1, "redundancy": "eager", "log_every": 1}, "1:2"),
    "given starts": ({"blocks": 3, "partition": "4"}, "1:4"),
    "fewer workers": ({"stages": 4, "blocks": 2, "workers": 3}, "1:2"),
    "at the log": ({"blocks": 4}, "1:1:LOG"),
    "in the update": ({"blocks": 4}, "0:6:STEP"),
}
TWO_PIPELINES: dict[str, tuple[dict[str, Any], str]] = {
    "reroute": ({"blocks": 4, "redundancy": "reroute"}, "1:5@1"),
    "none": ({"blocks": 2, "redundancy": "none"}, "1:2"),
    "one less": ({"blocks": 4, "workers": 3}, "1:2@1"),
}
ALL = [
    (name, pipelines, case)
    for name in JOBS
    for pipelines in (1, 2)
    for case in (*EXACT, *(TWO_PIPELINES if pipelines == 2 else ()))
]
SAMPLE = [("gpt", 1, "recomputed")]


@cache
def rows_without_blocks(name: str, pipelines: int) -> list[TrajectoryRow]:
    job = replace(JOBS[name], pipelines=pipelines)
    ending = run_in_threads(job)
    assert (ending.outcome, ending.error) == ("finished", None)
    rows = ending.view.run_state.rows
    assert [row.texts() for row in rows] == train_plainly(job)
    return rows


_SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("name", "pipelines", "blocks"),
    [
        ("gpt", 2, 2),
        *(pytest.param("gpt", *shape, marks=_SOAK) for shape in ((1, 2), (1, 4), (2, 4))),
        *(pytest.param("resnet18", *shape, marks=_SOAK) for shape in ((1, 2), (1, 4), (2, 2), (2, 4))),
    ],
)
def test_blocks_are_one_block_and_a_plain_loop(name: str, pipelines: int, blocks: int) -> None:
    ending = run_in_threads(replace(JOBS[name], pipelines=pipelines, blocks=blocks))
    assert (ending.outcome, ending.error) == ("finished", None)
    assert len(ending.view.run_state.starts) == 2 * blocks
    assert ending.view.run_state.rows == rows_without_blocks(name, pipelines)


def check_case(name: str, pipelines: int, case: str) -> None:
    fields, kill = (EXACT | TWO_PIPELINES)[case]
    job = replace(JOBS[name], pipelines=pipelines, **fields)
    ending = run_in_threads(job, parse_kills([kill], job))
    assert (ending.outcome, ending.error) == ("finished", None)
    assert [worker.state for worker in ending.view.workers].count("dead") == 1
    assert first_difference(ending.view.run_state.rows, rows_without_blocks(name, pipelines)) is None
    assert len(ending.view.run_state.rows) == len(rows_without_blocks(name, pipelines))


@pytest.mark.parametrize(("name", "pipelines", "case"), SAMPLE)
def test_blocks_change_no_bit(name: str, pipelines: int, case: str) -> None:
    check_case(name, pipelines, case)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "pipelines", "case"), [each for each in ALL if each not in SAMPLE])
def test_no_number_of_blocks_changes_a_bit(name: str, pipelines: int, case: str) -> None:
    check_case(name, pipelines, case)
