"""A worker in the middle is warned in time: its blocks go to both neighbours, and nothing is redone or changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.action import COMPUTE_OPS, parse_action
from engine.core.config.job import Job
from engine.core.errors import ExitCode
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import Runs, outcome_of
from tests.e2e.test_real_kills import exits_of, fault

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

HALVES = [*[0] * 6, *[2] * 6]
TIMED = Job(
    model="timed",
    model_args={"layers": 12, "forward_ms": 0.5, "backward_ms": 1, "width": 16},
    data_args={"features": 16},
    stages=3,
    blocks=4,
    microbatches=8,
    steps=9,
    validate_every=0,
)


@pytest.mark.parametrize(("elastic", "moment"), [(True, "2:5:F:3:after"), (False, "3:4:STEP")])
def test_the_blocks_of_a_leaver_go_to_both_neighbours(
    tmp_path: Path, server: ForkServer, elastic: bool, moment: str
) -> None:
    runs, job = Runs(tmp_path, server), replace(TIMED, elastic=elastic)
    ending, events = runs.run(job, [fault(moment, job, "terminate", grace_ns=60 * 10**9)])
    assert (ending.outcome, ending.error) == ("finished", None)
    epochs = [event for event in events if event["event"] == "epoch"]
    assert [event["planned"] for event in epochs] == [False, True, True], "a hand-over, then the leave"
    assert [list(event["owners"]) for event in epochs[1:]] == [HALVES, HALVES]
    assert exits_of(events) == {0: 0, 1: ExitCode.LEFT_WITH_NOTICE, 2: 0}
    ran = Counter(
        (event["step"], event["action"])
        for event in events
        if event["event"] == "action" and parse_action(event["action"]).op in COMPUTE_OPS
    )
    assert set(ran.values()) == {1}
    assert len(ran) == job.steps * 2 * job.slots * job.microbatches
    assert outcome_of(ending.view.run_state) == runs.twin(replace(job, blocks=1, elastic=False))
