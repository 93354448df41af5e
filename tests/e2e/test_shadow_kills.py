"""Real kills of shadows, and of workers beside their steps; and the count of all targets of kills.

Rules: a fault at an action strikes the action's owner. A shadow is struck right before or after its own work as a
shadow, by a fault at its next own action. It is struck within that work by a layer of the model, or while it waits for
a stopped owner. Every run is compared with its forecast, action by action, so each planned kill has struck.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.action import SHARD_OPS, STASH_OPS, Op
from engine.core.faults.fault import WHENS, After, Fault, Worker
from engine.core.job.job import Job
from engine.core.program.schedules import SCHEDULES
from engine.runtime.agent.run_state import Ending
from engine.runtime.process.fork_client import ForkServer
from tests.e2e import test_real_kills, test_schedule_kills, test_streams
from tests.e2e.kill_forecast import PLACES, Forecast, Kill, Sort, pairs, plan_kills
from tests.e2e.kill_runs import Event, Runs, actions_of, differences, lives
from tests.kills import parse_kill

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]

SMALL: dict[str, Any] = {
    **{"stages": 4, "microbatches": 4, "steps": 6, "validate_every": 3, "audit": 1},
    "check_pure": False,  # which takes longer than such a run
}
DEADLY: dict[str, Any] = {**SMALL, "model": "tests.e2e.kill_models:deadly"}


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    """Returns a runner of jobs; it runs each twin once."""
    return Runs(tmp_path_factory.mktemp("kills"), server)


def planned_kills() -> Iterator[Kill]:
    """Yields every kill that `make test` has; each is proved to strike at its action."""
    for _, kills in test_real_kills.sample():
        yield from kills
    for schedule in SCHEDULES:
        for number in test_schedule_kills.kills_of(schedule):
            yield test_schedule_kills.kill_of(schedule, number)
    for setting in test_streams.SETTINGS:
        yield from test_streams.plan_of(setting)[1]


def kills_of_the_soak() -> Iterator[Kill]:
    """Yields more kills, those of `make soak-tests`: some strike a shadow beside its work."""
    for _, kills in test_real_kills.every_sort():
        yield from kills
    for schedule in SCHEDULES:
        for number in range(test_schedule_kills.num_kills(schedule)):
            yield test_schedule_kills.kill_of(schedule, number)


# With shards no worker can take over: see test_fsdp.py. A counted forward runs again only after a second death, at a
# moment that no step names: the soak strikes there.
NEVER_NAMED = {*SHARD_OPS, Op.REDO_F}
# tests/e2e/test_checkpoint_kills.py; hand-overs inside a step: test_faults.py, and tests/runtime/test_hand_over.py;
# copies to the host: test_offload_kills.py
ELSEWHERE = {Op.CHECKPOINT, Op.HAND, Op.SHIP, *STASH_OPS}
AT_ONE_END = {"first": {Op.RECV_F, Op.SEND_B}, "middle": set[Op](), "last": {Op.SEND_F, Op.RECV_B}}


def test_every_kind_of_action_is_struck_before_in_and_after_it() -> None:
    kills = list(planned_kills())
    struck = {kill.sort for kill in kills}
    every = {
        Sort(op, when, place)
        for op in Op
        for when in WHENS
        for place in PLACES
        if op not in NEVER_NAMED | ELSEWHERE and op not in AT_ONE_END[place]
    }
    assert pairs(every) - pairs(struck) == set()
    beside = {kill.beside for kill in (*kills, *kills_of_the_soak())}
    assert {(op, when) for op in (Op.F, Op.LOG, Op.STREAM) for when in ("before", "after")} - beside == set()


def check(runs: Runs, job: Job, ran: tuple[Ending, list[Event]], *victims: int) -> None:
    """Checks that the victims are gone and that all else equals the twin."""
    ending, events = ran
    if job.model == DEADLY["model"]:
        job = replace(job, model_args={})
    assert list(differences(ending, runs.twin(job))) == []
    assert list(lives(events, victims)) == []


@pytest.mark.parametrize(
    ("stage", "shadow"),
    [(0, 3), pytest.param(1, 0, marks=pytest.mark.soak), (2, 1)],
    ids=["of the first", "of the next", "inside"],
)
def test_a_shadow_that_dies_in_a_redundant_forward(runs: Runs, stage: int, shadow: int) -> None:
    step, microbatch = 2, 1
    call = step * SMALL["microbatches"] + microbatch
    job = Job(**DEADLY, redundancy="eager", model_args={"layer": stage, "worker": shadow, "call": call})
    ran = runs.run(job)
    check(runs, job, ran, shadow)
    program, done = Forecast(job).program()[shadow], list(actions_of(ran[1], shadow, step))
    assert (program[len(done)].stage, program[len(done)].op, program[len(done)].microbatch) == (stage, Op.F, microbatch)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2], ids=["first", "second", "third"])
def test_whoever_dies_in_a_validation(runs: Runs, stage: int) -> None:
    job = Job(**DEADLY, model_args={"layer": stage, "worker": stage, "call": 1, "training": False})
    ran = runs.run(job)
    check(runs, job, ran, stage)
    (epoch,) = (event for event in ran[1] if event["event"] == "epoch" and event["verdict"])
    commits = [event["step"] for event in ran[1] if event["event"] == "commit" and event["at_ns"] < epoch["at_ns"]]
    assert commits[-1] == SMALL["validate_every"] - 1


def in_wait_for_a_log(job: Job, step: int, stage: int, shadow: int) -> list[Fault]:
    """Returns faults that hold an owner before it logs, and kill a shadow that waits for the log.

    The owner's process still runs: otherwise its earlier transfers would arrive only at workers that were early.
    """
    at = parse_kill(f"{step}:{stage}:LOG:before", job)
    stands = replace(at, do="hang", parameters={"for_ns": 2 * 10**9, "gil": "released"})
    dies = Fault("dies", After(stands.id, None, 10**9), (Worker(shadow),))
    return [stands, dies]


@pytest.mark.parametrize("owner", [0, *(pytest.param(each, marks=pytest.mark.soak) for each in (1, 2))])
def test_a_shadow_that_dies_while_it_waits_for_a_log(runs: Runs, owner: int) -> None:
    job = Job(**{**SMALL, "stages": 3}, model="mlp")
    shadow = Forecast(job).ownership.shadows_of(0, owner)[0]
    ran = runs.run(job, in_wait_for_a_log(job, 2, owner, shadow), silent_after="30s", hang_after="30s")
    check(runs, job, ran, shadow)
    program, done = Forecast(job).program()[shadow], list(actions_of(ran[1], shadow, 2))
    assert str(program[len(done)]) == f"{owner}LOG"


@pytest.mark.parametrize(("beside", "when"), [(-1, "after"), (1, "before")], ids=["before it", "after it"])
def test_a_new_shadow_that_dies_as_it_takes_its_replica(runs: Runs, beside: int, when: str) -> None:
    """It takes the replica after its last SEND: so it dies right after that SEND, or right before the next action."""
    job = Job(**{**SMALL, "stages": 6}, model="mlp", model_args={"depth": 5})
    forecast, (kill,) = Forecast(job), plan_kills(job, (Sort(Op.F, "after", "middle"),), 0, most=1)
    forecast.dies(kill.worker)
    program, step = forecast.program(), kill.step + 1
    shadow, at = next(
        (worker, at)
        for worker, actions in program.items()
        for at, action in enumerate(actions)
        if action.op is Op.HEAL and forecast.ownership.owner(0, action.stage) != worker and forecast.survives(worker)
    )
    struck = program[shadow][at + beside]
    assert forecast.ownership.owner(0, struck.stage) == shadow
    microbatch = "" if struck.microbatch < 0 else f":{struck.microbatch}"
    texts = (kill.text, f"{step}:{struck.stage}:{struck.op.value}{microbatch}:{when}")
    ran = runs.run(job, [parse_kill(text, job) for text in texts])
    check(runs, job, ran, kill.worker, shadow)
    assert len(list(actions_of(ran[1], shadow, step))) == at + max(beside, 0)


@pytest.mark.parametrize("fields", [{}, {"redundancy": "eager"}, {"log_every": 1}], ids=["lazy", "eager", "streams"])
def test_a_replica_that_was_healed_in_the_open_step_is_a_live_copy(runs: Runs, fields: dict[str, Any]) -> None:
    """Worker 1 dies in step 2. In step 3 worker 0 gets a replica of stage 2, whose owner dies before the commit.

    Step 3 lacks votes, so the replica is in no committed set of shadows; but it is complete, and the only one.
    """
    job = Job(**{**SMALL, "stages": 3}, model="mlp", **fields)
    ran = runs.run(job, [parse_kill(text, job) for text in ("2:1:F:1", "3:2:COMMIT:before")])
    check(runs, job, ran, 1, 2)
    _, events = ran
    healed = [event["action"] for event in events if event["event"] == "action" and event["action"] == "2HEAL"]
    assert healed, "no replica of stage 2 was healed"
    heirs = [event["owners"] for event in events if event["event"] == "heirs"]
    assert heirs == [[0, 0, 0]]
