"""Real kills under every schedule: two stages on each worker where the schedule takes them, split backwards too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from engine.core.action import Op
from engine.core.faults.fault import WHENS
from engine.core.job.job import Job
from engine.core.ownership import directions_of
from engine.core.program.schedules import SCHEDULES
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_forecast import PLACES, Kill, Sort, pairs, plan_kills
from tests.e2e.kill_runs import Runs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_etcd")]

SMALL: dict[str, Any] = {
    "model": "mlp",
    "model_args": {"width": 16, "depth": 7, "dropout": 0.1},
    "microbatch_size": 2,
    "steps": 4,
    "validate_every": 0,
    "check_pure": False,
}
ALL_KINDS: dict[str, Any] = {"model": "tests.e2e.state_models:all_kinds", "model_args": {}}
WORKERS = 4
SPLIT = tuple(Sort(op, when, place) for op in (Op.I, Op.W) for when in WHENS for place in PLACES)
OF_PARTS = 5  # kills of a schedule that strike parts of split backwards
TWICE = ("v-half", "zbv", "dualpipe")  # have the kinds of actions that no other kill of `make test` strikes


def kills_of(schedule: str) -> tuple[int, ...]:
    """Returns the numbers of the kills of `make test`: one, of a part of a split backward if there is one; or two."""
    index = list(SCHEDULES).index(schedule)
    first = 2 * (index + 1) % OF_PARTS if is_split(schedule) else index % 6
    return (first, 6 + index % 2) if schedule in TWICE else (first,)


def is_split(schedule: str) -> bool:
    lists = SCHEDULES[schedule](WORKERS, 8, 2 if SCHEDULES[schedule].takes(2) else 1)
    return any(action.op is Op.W for line in lists for action in line)


def num_kills(schedule: str) -> int:
    """Returns the number of all kills, each in its own run: after the first kill a run has another program.

    Split backwards have more actions to strike. `make soak` makes more kills, and several in a run.
    """
    return 8 if is_split(schedule) else 6


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    """Returns a runner of jobs; it runs each twin once."""
    return Runs(tmp_path_factory.mktemp("kills"), server)


def job_of(schedule: str, number: int, model: dict[str, Any] = SMALL) -> Job:
    """Returns a job on four workers; every other is eager, and every third has an odd number of microbatches."""
    stages_per_worker = 2 if SCHEDULES[schedule].takes(2) else 1
    return Job(
        **SMALL | model,
        stages=WORKERS * stages_per_worker,
        stages_per_worker=stages_per_worker,
        schedule=schedule,
        redundancy=("lazy", "eager")[number % 2],
        microbatches=9 if number % 3 == 0 else 8,
        pipelines=directions_of(schedule),
    )


def kill_of(schedule: str, number: int) -> Kill:
    """Returns the kill of a run; with split backwards most kills strike their parts, each another sort."""
    first = (list(SCHEDULES).index(schedule) * OF_PARTS + number) % len(SPLIT)
    others = (Sort(Op.F, "during", "middle"),) if number == OF_PARTS else ()
    wanted = SPLIT[first:] + SPLIT[:first] if number < OF_PARTS else others
    (kill,) = plan_kills(job_of(schedule, number), wanted, number, most=1)
    return kill


def test_the_kills_are_enough_and_of_every_part_of_a_backward() -> None:
    assert sum(map(num_kills, SCHEDULES)) >= 60
    kills = [(schedule, kill_of(schedule, number)) for schedule in SCHEDULES for number in kills_of(schedule)]
    assert {kill.worker for _, kill in kills} == set(range(WORKERS))
    assert pairs(kill.sort for _, kill in kills) >= pairs(SPLIT)
    every = {kill_of(each, number).sort for each in SCHEDULES for number in range(num_kills(each))}
    assert every >= set(SPLIT), "of the soak"
    assert {kill.sort.op for _, kill in kills} >= {Op.F, Op.B, Op.SEND_F, Op.RECV_B, Op.LOG, Op.COMMIT, Op.STEP}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_comes_of_a_kill_under_any_schedule(runs: Runs, schedule: str) -> None:
    strike_all(runs, schedule, kills_of(schedule))


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_comes_of_all_kills_under_any_schedule(runs: Runs, schedule: str) -> None:
    strike_all(runs, schedule, range(num_kills(schedule)))


def strike_all(runs: Runs, schedule: str, numbers: Iterable[int]) -> None:
    for number in numbers:
        kill = kill_of(schedule, number)
        assert runs.strike(job_of(schedule, number), [kill]) == [], (number, kill.text)


@pytest.mark.soak
@pytest.mark.parametrize(("schedule", "number"), [("interleaved", 1), ("zbv", 6)])
def test_nothing_comes_of_it_where_layers_have_state_of_all_kinds(runs: Runs, schedule: str, number: int) -> None:
    """In `make test`, `test_state_kills.py` has this model under each of these schedules, with a kill."""
    kill = kill_of(schedule, number)
    assert runs.strike(job_of(schedule, number, ALL_KINDS), [kill]) == [], kill.text
