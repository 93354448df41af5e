"""A worker becomes slow for good: it is told, relieved of blocks, and never put out; no bit depends on it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.job.job import Job
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import Runs, outcome_of
from tests.e2e.test_real_kills import exits_of, fault

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]

TIMED = Job(
    model="timed",
    model_args={"layers": 12, "forward_ms": 1, "backward_ms": 2, "width": 16},
    data_args={"features": 16},
    stages=3,
    blocks=4,
    microbatches=4,
    steps=44,
    validate_every=0,
    check_pure=False,
)
BEGIN_STEP = 23  # the past of each worker is long enough


@pytest.mark.parametrize("elastic", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_slow_worker_is_told_and_an_elastic_job_relieves_it(
    tmp_path: Path, server: ForkServer, elastic: bool
) -> None:
    runs, job = Runs(tmp_path, server), replace(TIMED, elastic=elastic)
    slow = fault(f"{BEGIN_STEP}:5:F:0", job, "slow", factor=4.0, for_ns=600 * 10**9)
    ending, events = runs.run(job, [slow])
    assert (ending.outcome, ending.error) == ("finished", None)
    assert exits_of(events) == {0: 0, 1: 0, 2: 0}
    paces = [event for event in events if event["event"] == "pace" and event["of"] == 1]
    assert paces[0]["step"] <= BEGIN_STEP + 9
    assert 2.5 < paces[0]["slowness"] < 6
    assert any(paces[0]["why"] in note for note in ending.view.run_state.notes)
    owned = [[*event["owners"]].count(1) for event in events if event["event"] == "epoch"]
    moved = [event for event in events if event["event"] == "policy" and event["owners"]]
    if elastic:
        assert (owned[-1], len(moved)) == (1, 1)
        assert " are copied" in moved[0]["why"], "the sizes of blocks are known"
    else:
        assert (owned, moved) == ([4], [])
    awake = {**TIMED.model_args, "forward_ms": 0, "backward_ms": 0}
    assert outcome_of(ending.view.run_state) == runs.twin(replace(job, blocks=1, elastic=False, model_args=awake))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_busy_machine_moves_nothing_in_a_thousand_steps(tmp_path: Path, server: ForkServer) -> None:
    job = replace(TIMED, model="mlp", model_args={"depth": 11, "width": 64}, data_args={}, steps=1000, elastic=True)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        ending, events = Runs(tmp_path, server).run(job, [])
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert ending.outcome == "finished"
    assert [event for event in events if event["event"] == "policy" and event["owners"]] == []
    assert [event["epoch"] for event in events if event["event"] == "epoch"] == [1]
