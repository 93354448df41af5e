"""Sequence slices: a real run, with and without kills, has the bits of a plain loop in the sliced order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from engine.core.job.job import Job
from engine.core.messages import Evaluation
from engine.runtime.agent.run_state import Ending
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import Runs
from tests.e2e.plain_loop import PlainLoop, Texts
from tests.kills import parse_kills

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]

JOB = Job(
    model="gpt",
    model_args={"width": 16, "heads": 2, "depth": 4, "tied": True},
    stages=3,
    microbatches=3,
    microbatch_size=2,
    slices=2,
    steps=4,
    warmup_steps=1,
    validate_every=2,
    validation_microbatches=2,
)


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    return Runs(tmp_path_factory.mktemp("slices"), server)


def assert_like_a_plain_loop(job: Job, ending: Ending) -> None:
    """Compares losses, hashes and validations of a run with those of a loop over the slices in one process."""
    assert ending.error is None, ending.error
    loop, rows, validations = PlainLoop(job), list[Texts](), dict[int, tuple[Evaluation, ...]]()
    for step in range(job.steps):
        rows += loop.step(step)
        if step % 2:
            validations[step] = loop.validate()
    assert [row.texts() for row in ending.view.run_state.rows] == rows
    assert ending.view.run_state.validations == validations


def test_kills_between_the_slices_of_a_microbatch_change_no_bit(runs: Runs) -> None:
    """A worker dies between the two backwards of a microbatch, another one between its two forwards."""
    kills = ["1:1:B:2:after", "3:0:F:3:before"]
    ending, events = runs.run(JOB, parse_kills(kills, JOB))
    assert_like_a_plain_loop(JOB, ending)
    assert [event["of"] for event in events if event["event"] == "fault"] == [1, 0]
    assert {event["action"] for event in events if event["event"] == "action"} >= {"0B5", "2F5"}


def test_a_waiting_worker_takes_blocks_whose_slices_had_begun(runs: Runs) -> None:
    """The owner of two blocks dies between two backwards; the waiting worker owns blocks two steps later."""
    job = replace(JOB, stages=2, blocks=2, elastic=True, standby=1, steps=8)
    ending, events = runs.run(job, parse_kills(["2:3:B:2:after"], job))
    assert_like_a_plain_loop(job, ending)
    owners = [Counter[int](event["owners"]) for event in events if event["event"] == "epoch"]
    assert owners == [{0: 2, 1: 2}, {0: 4}, {0: 2, 2: 2}]
