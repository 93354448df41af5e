"""Sequence slices: a real run, with and without kills, has the bits of a plain loop in the sliced order."""

from __future__ import annotations

import pytest

from engine.core.job.job import Job
from engine.core.messages import Evaluation
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


def test_kills_between_the_slices_of_a_microbatch_change_no_bit(runs: Runs) -> None:
    """A worker dies between the two backwards of a microbatch, another one between its two forwards."""
    loop, rows, validations = PlainLoop(JOB), list[Texts](), dict[int, tuple[Evaluation, ...]]()
    for step in range(JOB.steps):
        rows += loop.step(step)
        if step % 2:
            validations[step] = loop.validate()
    kills = ["1:1:B:2:after", "3:0:F:3:before"]
    ending, events = runs.run(JOB, parse_kills(kills, JOB))
    assert ending.error is None, ending.error
    assert [row.texts() for row in ending.view.run_state.rows] == rows
    assert ending.view.run_state.validations == validations
    assert [event["of"] for event in events if event["event"] == "fault"] == [1, 0]
    assert {event["action"] for event in events if event["event"] == "action"} >= {"0B5", "2F5"}
