"""Blocks of workers that leave or die go to all others: the same bits, and no step longer than its dry run says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.action import COMPUTE_OPS, parse_action
from engine.core.errors import ExitCode
from engine.core.job.job import Job
from engine.core.ownership import Grid, Ownership
from engine.core.program.teams import teams_of
from engine.runtime.process.fork_client import ForkServer
from tests.core.test_assignment import makespan
from tests.e2e.kill_runs import Runs, outcome_of
from tests.e2e.test_real_kills import exits_of, fault

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]

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
    check_pure=False,
)
# Two pipelines of four workers with three blocks each; the longest step of each number of workers, in units.
# All blocks take equally long, also as they are measured: what a busy machine adds is little beside it.
GRID = replace(
    TIMED,
    model_args={**TIMED.model_args, "forward_ms": 2, "backward_ms": 4},
    stages=4,
    blocks=3,
    pipelines=2,
    microbatch_size=2,
    steps=60,
    elastic=True,
)
LONGEST = {8: 99, 7: 120, 6: 120, 5: 138, 4: 162}  # of 7 workers the best known is 118
MOMENTS = ("3:4:F:2@1", "15:0:B:1@0", "27:7:F:2@0", "39:10:F:2@1")


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


V = {"stages": 6, "stages_per_worker": 2, "schedule": "zbv", "blocks": 2}
SHARDS = {"stages": 2, "blocks": 6, "pipelines": 2, "fsdp": 1}


@pytest.mark.parametrize(
    ("fields", "moments"),
    [
        pytest.param(V, ["2:5:F:3"], id="v", marks=pytest.mark.soak),
        pytest.param(SHARDS, ["2:5:F:3", "9:9:F:3@1"], id="fsdp", marks=pytest.mark.soak),
    ],
)
def test_blocks_are_dealt_anew_when_workers_die(
    tmp_path: Path, server: ForkServer, fields: dict[str, Any], moments: list[str]
) -> None:
    """The two workers that are left have the runs of the schedule again, and it orders their steps."""
    runs, job = Runs(tmp_path, server), replace(TIMED, elastic=True, steps=30, **fields)
    ending, events = runs.run(job, [fault(moment, job, "kill") for moment in moments])
    assert (ending.outcome, ending.error) == ("finished", None)
    owners = [event["owners"] for event in events if event["event"] == "epoch"][-1]
    assert len({*owners}) == 2
    assert len(teams_of(job.schedule, Ownership(job.grid, tuple(owners)))) == job.pipelines
    last = {event["action"] for event in events if event["event"] == "action" and event["step"] == job.steps - 1}
    assert "0I3" in last if job.schedule == "zbv" else any("RESHARD" in each for each in last)
    assert outcome_of(ending.view.run_state) == runs.twin(replace(job, blocks=1, fsdp=0, elastic=False))


@pytest.mark.soak
@pytest.mark.parametrize("do", ["kill", "terminate"])
def test_two_pipelines_shrink_from_eight_workers_to_four(tmp_path: Path, server: ForkServer, do: str) -> None:
    runs = Runs(tmp_path, server)
    grace = {"grace_ns": 60 * 10**9} if do == "terminate" else {}
    ending, events = runs.run(GRID, [fault(moment, GRID, do, **grace) for moment in MOMENTS])
    assert (ending.outcome, ending.error) == ("finished", None)
    assert outcome_of(ending.view.run_state) == runs.twin(replace(GRID, blocks=1, elastic=False))
    epochs = [tuple(event["owners"]) for event in events if event["event"] == "epoch"]
    settled = {len({*owners}): owners for owners in epochs}
    assert settled.keys() == LONGEST.keys()
    for owners in (
        epochs if do == "terminate" else settled.values()
    ):  # who leaves in time hands over to the wanted owners
        assert makespan(owners, Grid(12, 8, pipelines=2)) <= LONGEST[len({*owners})]
