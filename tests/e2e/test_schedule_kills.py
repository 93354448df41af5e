"""Real kills under every schedule: two stages on each worker where the schedule takes them, split backwards too."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.action import Op
from engine.core.job import Job
from engine.core.schedules.registry import SCHEDULES
from engine.runtime.children import ForkServer
from tests.e2e.kill_forecast import Kill, plan_kills
from tests.e2e.kill_runs import Runs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SMALL: dict[str, Any] = {
    "model": "mlp",
    "model_args": {"width": 16, "depth": 7, "dropout": 0.1},
    "microbatch_size": 2,
    "steps": 4,
    "validate_every": 0,
}
WORKERS = 4
KILLS = 8  # of each schedule, each in a run of its own: after the first, it is no longer the schedule that runs


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    """Returns what runs jobs, and each twin once."""
    return Runs(tmp_path_factory.mktemp("kills"), server)


def job_of(schedule: str, number: int) -> Job:
    """Returns a job on four workers; every other is eager, and every third has an odd number of microbatches."""
    stages_per_worker = 2 if SCHEDULES[schedule].takes(2) else 1
    return Job(
        **SMALL,
        stages=WORKERS * stages_per_worker,
        stages_per_worker=stages_per_worker,
        schedule=schedule,
        redundancy=("lazy", "eager")[number % 2],
        microbatches=9 if number % 3 == 0 else 8,
    )


def kill_of(schedule: str, number: int) -> Kill:
    """Returns the one kill of a run."""
    (kill,) = plan_kills(job_of(schedule, number), (), number, most=1)
    return kill


def test_the_kills_are_enough_and_of_many_sorts() -> None:
    kills = [(schedule, kill_of(schedule, number)) for schedule in SCHEDULES for number in range(KILLS)]
    assert len(kills) >= 60
    assert {kill.worker for _, kill in kills} == set(range(WORKERS))
    assert {kill.sort.op for _, kill in kills} >= {
        Op.F,
        Op.B,
        Op.I,
        Op.W,
        Op.SEND_F,
        Op.RECV_B,
        Op.LOG,
        Op.COMMIT,
        Op.STEP,
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_comes_of_a_kill_under_any_schedule(runs: Runs, schedule: str) -> None:
    for number in range(KILLS):
        kill = kill_of(schedule, number)
        assert runs.strike(job_of(schedule, number), [kill]) == [], (number, kill.text)
