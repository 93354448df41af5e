"""Workers that leave, join, are started again and stand still, over the calls of NCCL: processes, and a strict double.

The bits are those of twins over links, and no call breaks a rule of NCCL.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ExitCode
from engine.core.history.process_records import StartedRecord
from engine.core.history.run_records import PartitionRecord, Record
from engine.core.job.job import Job
from tests.doubles.nccl_double import WHY_NOT, Double
from tests.e2e import test_real_kills
from tests.e2e.hang_cells import NUM_CELLS, found_in, slowest_of_rows, wrong
from tests.e2e.kill_runs import outcome_of
from tests.e2e.launcher import Launcher
from tests.e2e.over_nccl import OVER_NCCL, OverNccl, over_nccl
from tests.e2e.test_block_hand_over import HALVES, TIMED
from tests.e2e.test_joining import grown_back, joined, told
from tests.e2e.test_real_kills import check, exits_of, fault, leaving_job, leavings, out_of
from tests.e2e.test_restarts import JOB, Killer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

Launch = Callable[..., Launcher]
SETTINGS = [part for name, value in OVER_NCCL.items() for part in ("--set", f"{name}={value}")]
MLP = ["model=mlp", "model_args.width=16", "model_args.depth=11", "validate_every=0"]
GRACE_NS = 60 * 10**9


@pytest.fixture(name="double")
def _double(tmp_path: Path) -> Double:
    """A double of its own for the launches of a test."""
    return Double(tmp_path / "double")


def is_clean(double: Double) -> bool:
    return double.offences() == [] and double.counts()["eager"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("setting", test_real_kills.LEAVING)
def test_who_is_warned_in_time_hands_over(nccl: OverNccl, setting: str) -> None:
    job, kills = over_nccl(leaving_job(setting)), leavings(setting)
    nccl.has_next_modes()
    ending, events = nccl.runs.run(job, [fault(kill.text, job, "terminate", grace_ns=GRACE_NS) for kill in kills])
    check(nccl.runs, job, ending, events)
    gone = [kill.worker for kill in kills]
    left = ExitCode.LEFT_WITH_NOTICE
    assert exits_of(events) == {worker: left if worker in gone else 0 for worker in exits_of(events)}
    assert sorted(out_of(events)) == sorted(gone)
    nccl.check()


@pytest.mark.soak
@pytest.mark.parametrize("elastic", [True, False])
def test_the_blocks_of_a_leaver_go_to_both_neighbours(nccl: OverNccl, elastic: bool) -> None:
    job = over_nccl(replace(TIMED, elastic=elastic))
    ending, events = nccl.runs.run(job, [fault("2:5:F:3:after", job, "terminate", grace_ns=GRACE_NS)])
    assert (ending.outcome, ending.error) == ("finished", None)
    epochs = [event for event in events if event["event"] == "epoch"]
    assert [list(event["owners"]) for event in epochs[1:]] == [HALVES, HALVES]
    assert outcome_of(ending.view.run_state) == nccl.runs.twin(replace(job, blocks=1, elastic=False))
    nccl.check()


@pytest.mark.soak
@pytest.mark.parametrize("kind", [StartedRecord, PartitionRecord], ids=["while it joins", "while it builds"])
def test_all_workers_are_started_again(monkeypatch: pytest.MonkeyPatch, nccl: OverNccl, kind: type[Record]) -> None:
    job: Job = over_nccl(JOB)
    usual = nccl.runs.twin(job)
    with monkeypatch.context() as patch:
        Killer(patch, kind, 1)
        ending, events = nccl.runs.run(job)
    assert (ending.outcome, ending.error) == ("finished", None)
    assert outcome_of(ending.view.run_state) == usual
    assert [each["number"] for each in events if each["event"] == "restart"] == [1]
    nccl.check()


@pytest.mark.soak
def test_workers_join_and_one_leaves_at_its_notice(launch: Launch, double: Double) -> None:
    grid = ("--stages", "3", "--blocks", "4", "--elastic", "--steps", "2000", "--json")
    run = launch("run", *[f"--set={each}" for each in MLP], *SETTINGS, *grid, **double.environment)
    run.wait_until(lambda: run.events("commit"))
    command = joined(launch, run)
    run.wait_until(lambda: told(command, "owns"))
    command.interrupt()
    assert command.wait(60).code == 0
    assert told(command, "ended")[0]["code"] == ExitCode.LEFT_WITH_NOTICE
    run.interrupt()
    run.wait(60)
    assert all(each["planned"] for each in run.events("epoch")[1:])
    assert is_clean(double), double.offences()


@pytest.mark.soak
def test_a_job_shrinks_by_kills_and_grows_back(launch: Launch, double: Double) -> None:
    timed = ("model=timed", *(f"model_args.{each}" for each in ("layers=12", "forward_ms=4", "backward_ms=4")))
    grown_back(launch, *[f"--set={each}" for each in (*timed, "microbatches=2")], *SETTINGS, **double.environment)
    assert is_clean(double), double.offences()


@pytest.mark.soak
def test_whoever_stops_is_put_out_by_its_deadline(launch: Launch, double: Double) -> None:
    given = ("matrix", "matrix-hangs", *SETTINGS, "--jobs", "2", "--limit", "60", "--keep", "--json")
    launcher = launch(*given, **double.environment)
    done = launcher.wait(880)
    assert done.code == 0, done.stdout + done.stderr
    cells: list[dict[str, Any]] = json.loads(done.stdout)["cells"]
    assert len(cells) == NUM_CELLS
    (runs,) = (launcher.folder / "results" / "matrices").glob("*-matrix-hangs-*/runs")
    found = [found_in(runs, cell) for cell in cells]
    assert [words for each in found if (words := wrong(each, "a played GPU"))] == []
    assert is_clean(double), double.offences()
    print(slowest_of_rows(found))
