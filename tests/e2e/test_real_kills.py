"""Hundreds of real faults, at every kind of action: only the absence of the victim may show.

Rules: every committed step of a run has the bits of its fault-free twin. The events prove each fault, at the named
action. `make test` has every op before, in and after it and at every place, in settings that have each model and each
redundancy; `make soak-tests` has every sort with every redundancy, and `make soak` makes further kills.
"""

from __future__ import annotations

import functools
import re
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest

from engine.core.action import Op
from engine.core.errors import ExitCode
from engine.core.faults.fault import WHENS, Fault
from engine.core.job.job import Job
from engine.core.ownership import Redundancy
from engine.runtime.agent.run_state import Ending
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_forecast import OPS, PLACES, SORTS, Kill, Sort, pairs, plan_kills
from tests.e2e.kill_runs import SETTINGS, Event, Runs, actions_of, differences, job_of, lives, not_as_forecast
from tests.e2e.recorded import events_of
from tests.kills import parse_kill, parse_kills
from tests.soaked import soaked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_etcd")]

# With reroute and none the other pipeline has the only copy, so a worker that heals has no further replica. Heirs act
# as with lazy and two pipelines, so every third sort is enough.
_FEWER = tuple(
    sort
    for sort in SORTS
    if sort.op is not Op.HEAL and (WHENS.index(sort.when) + OPS.index(sort.op)) % 3 == PLACES.index(sort.place)
)
KINDS = {"lazy": SORTS, "eager": SORTS, "reroute": _FEWER, "none": _FEWER}
LEAST_KILLS = 150
SQUARE = tuple(
    sort
    for sort in SORTS
    if (WHENS.index(sort.when) + OPS.index(sort.op)) % 3 == PLACES.index(sort.place)
    or (sort.place == "middle" and not all(Sort(sort.op, sort.when, place) in SORTS for place in PLACES))
)
# Each model and each redundancy, alone and in pairs, with two shadows and with streams; test_streams.py has a resnet18.
SHORT = (
    *("mlp-lazy-2", "mlp-eager", "mlp-none-x2", "gpt-lazy-x2", "gpt-reroute-x2"),
    *("kinds-lazy", "kinds-eager-streamed", "kinds-none-x2"),
)
SILENCE = "1500ms"
STEPS_TO_HEAL = 4  # the struck one, two that restore shadows, and one after them
STEPS_TO_LEAVE = 5  # to hand over, heal, go, and heal again
SMALL: dict[str, Any] = {
    **{"model": "mlp", "stages": 3, "microbatches": 4, "steps": 8, "validate_every": 3},
    "check_pure": False,  # which takes longer than such a run
}
SIX_STAGES: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp", "model_args": {"depth": 5, "dropout": 0.1}},
    "gpt": {"model": "gpt", "model_args": {"width": 16, "heads": 2, "tied": True}},
}
UNSHARDED = [name for name in SETTINGS if not job_of(name).fsdp]  # `test_fsdp.py` has the others
SPINNING: dict[str, Any] = {**SMALL, "model": "tests.e2e.kill_models:spinning", "validate_every": 0}


def covering(settings: Sequence[str], sorts: Iterable[Sort]) -> tuple[tuple[str, tuple[Kill, ...]], ...]:
    """Returns runs, as (setting, kills), that together have all settings and every one of some sorts of kill."""
    left, runs = list(sorts), []
    for seed in count():
        setting = settings[seed % len(settings)]
        kills = plan_kills(job_of(setting), left, seed)
        runs.append((setting, kills))
        struck = {kill.sort for kill in kills}
        left = [sort for sort in left if sort not in struck]
        if not left and seed >= len(settings):
            break
    return tuple(runs)


@functools.cache
def suite(redundancy: str) -> tuple[tuple[str, tuple[Kill, ...]], ...]:
    """Returns the runs of the soak, which have every sort of kill with this redundancy."""
    return covering([name for name in UNSHARDED if job_of(name).redundancy == redundancy], KINDS[redundancy])


@functools.cache
def sample() -> tuple[tuple[str, tuple[Kill, ...]], ...]:
    """Returns the runs of `make test`, which have each op at each moment and at each place."""
    return covering(SHORT, SQUARE)


@functools.cache
def every_sort() -> tuple[tuple[str, tuple[Kill, ...]], ...]:
    """Returns runs of the soak, which have every sort of kill once, in all settings without convolutions."""
    return covering([name for name in UNSHARDED if not name.startswith("resnet18")], SORTS)


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    """Returns a runner of jobs; it runs each twin once for this file."""
    return Runs(tmp_path_factory.mktemp("kills"), server)


def fault(text: str, job: Job, do: str, **parameters: int | float | str) -> Fault:
    """Returns a fault of another kind at a moment in the syntax of ``--kill``."""
    return replace(parse_kill(text, job), do=do, parameters=parameters)


def exits_of(events: Sequence[Event]) -> dict[int, int]:
    return {event["of"]: event["code"] for event in events if event["event"] == "exit"}


def out_of(events: Sequence[Event]) -> list[int]:
    """Returns the excluded workers, in order."""
    return [worker for event in events if event["event"] == "epoch" for worker, *_ in event["verdict"]]


def check(runs: Runs, job: Job, ending: Ending, events: Sequence[Event]) -> None:
    """Checks that a run equals its twin, and that all its faults were confirmed."""
    assert list(differences(ending, runs.twin(job))) == []
    assert [event for event in events if event["event"] == "unconfirmed"] == []


def test_every_sort_of_kill_is_in_the_suite() -> None:
    for redundancy, sorts in KINDS.items():
        struck = Counter(kill.sort for _, kills in suite(redundancy) for kill in kills)
        assert struck.keys() >= set(sorts)
    assert sum(len(kills) for redundancy in KINDS for _, kills in suite(redundancy)) >= LEAST_KILLS
    assert {setting for redundancy in KINDS for setting, _ in suite(redundancy)} == set(UNSHARDED)
    short = {kill.sort for _, kills in sample() for kill in kills}
    assert pairs(short) == pairs(SORTS)
    assert {setting for setting, _ in sample()} == set(SHORT)
    assert {job_of(setting).redundancy for setting in SHORT} == KINDS.keys()


@pytest.mark.parametrize("setting", SHORT)
def test_nothing_comes_of_any_kill(runs: Runs, setting: str) -> None:
    strike_all(runs, setting, sample())


@pytest.mark.soak
@pytest.mark.parametrize("setting", [name for name in UNSHARDED if not name.startswith("resnet18")])
def test_nothing_comes_of_every_sort_of_kill(runs: Runs, setting: str) -> None:
    strike_all(runs, setting, every_sort())


@pytest.mark.soak
@pytest.mark.parametrize("setting", UNSHARDED)
def test_nothing_comes_of_any_kill_with_any_redundancy(runs: Runs, setting: str) -> None:
    strike_all(runs, setting, suite(job_of(setting).redundancy))


def strike_all(runs: Runs, setting: str, suite: Iterable[tuple[str, tuple[Kill, ...]]]) -> None:
    """Strikes a job that ends as soon as the last victim of all its runs has an heir and new shadows."""
    mine = [kills for each, kills in suite if each == setting]
    job = replace(job_of(setting), steps=max(kill.step for kills in mine for kill in kills) + STEPS_TO_HEAL)
    for kills in mine:
        assert runs.strike(job, kills) == [], [kill.text for kill in kills]


@pytest.mark.parametrize(("model", "seed"), [("mlp", 0), soaked("gpt", 1), soaked("mlp", 1), soaked("gpt", 0)])
def test_one_after_the_other_until_one_is_left(runs: Runs, model: str, seed: int) -> None:
    job = Job(**SIX_STAGES[model], stages=6, microbatches=4, steps=18, validate_every=3)
    kills = plan_kills(job, (), seed)
    assert len({kill.worker for kill in kills}) == 5
    assert {b.step - a.step for a, b in pairwise(kills)} == {3}
    assert runs.strike(job, kills) == [], [kill.text for kill in kills]


# With three pipelines or more, the order of a sum over pipelines shows in its bits.
MANY_PIPELINES: dict[str, Any] = {"model": "tests.e2e.kill_models:spinning", "stages": 2, "microbatches": 2, "steps": 6}


def adopting(runs: Runs, kills: Sequence[str], **fields: Any) -> list[str]:
    """Returns the deviations of a run in which owners of other pipelines adopt the slots of the dead."""
    job = Job(**{**MANY_PIPELINES, "validate_every": 0, "redundancy": "reroute", **fields})
    ending, events = runs.run(job, parse_kills(kills, job))
    parts = Counter(of for epoch in events if epoch["event"] == "epoch" for of in epoch["owners"])
    assert len(out_of(events)) == len(kills)
    assert max(parts.values()) > 1
    return list(differences(ending, runs.twin(replace(job, model=MANY_PIPELINES["model"]))))


@pytest.mark.parametrize(
    ("pipelines", "redundancy", "kills"),
    [(3, "reroute", ["1:1@1"]), (4, "none", ["1:1@1", "3:1:B:1@2"])],
    ids=["three", "four"],
)
def test_a_sum_over_three_or_four_pipelines_keeps_its_order(
    runs: Runs, pipelines: int, redundancy: str, kills: list[str]
) -> None:
    assert adopting(runs, kills, pipelines=pipelines, redundancy=redundancy) == []


def test_a_sum_in_the_wrong_order_is_seen(runs: Runs) -> None:
    wrong = adopting(runs, ["1:1@1"], pipelines=3, model="tests.e2e.kill_models:adding_in_reverse")
    assert "the rows differ from those of the twin" in wrong


def test_what_goes_otherwise_than_forecast_is_seen(runs: Runs) -> None:
    job = Job(**SMALL)
    (kill,) = plan_kills(job, (Sort(Op.B, "before", "middle"),), 0, most=1)
    assert runs.strike(job, [kill]) == []
    events = events_of(runs.last / "events.jsonl")
    assert list(not_as_forecast([kill], events)) == []
    assert "had done" in " ".join(not_as_forecast([replace(kill, done=kill.done[:-1])], events))
    assert "not worker 2" in " ".join(not_as_forecast([replace(kill, worker=2)], events))
    other = runs.run(replace(job, seed=1))[0]
    assert list(differences(other, runs.twin(job))) == [
        f"the {what} differ from those of the twin" for what in ("rows", "losses", "validations")
    ]
    assert "ended as" in " ".join(lives(events, []))
    restarted = next(event for event in events if event["event"] == "started")
    assert "started more than once" in " ".join(lives([*events, restarted], [1]))


LEAVING = ("mlp-lazy", "mlp-eager", "gpt-lazy", "gpt-eager-2", "mlp-lazy-x2", "mlp-reroute-x2", "resnet18-eager-x2")
LEAVING_SHORT = ("gpt-eager-2", "mlp-reroute-x2")  # two shadows and none; test_faults.py has one


def leaving_job(setting: str) -> Job:
    return replace(job_of(setting), steps=2 + 5 * STEPS_TO_LEAVE)


def leavings(setting: str) -> tuple[Kill, ...]:
    """Returns the moments of the notices in a run; together they are of every sort."""
    wanted = [sort for sort in SORTS if sort.op is not Op.HEAL]
    number = LEAVING.index(setting)
    return plan_kills(leaving_job(setting), wanted[number :: len(LEAVING)], number, between=STEPS_TO_LEAVE)


def test_there_are_enough_leavers() -> None:
    assert sum(len(leavings(setting)) for setting in LEAVING) >= 30


@pytest.mark.parametrize("setting", [name if name in LEAVING_SHORT else soaked(name) for name in LEAVING])
def test_who_is_warned_in_time_hands_over_and_nothing_is_redone(runs: Runs, setting: str) -> None:
    job, kills = leaving_job(setting), leavings(setting)
    faults = [fault(kill.text, job, "terminate", grace_ns=60 * 10**9) for kill in kills]
    ending, events = runs.run(job, faults)
    check(runs, job, ending, events)
    gone = [kill.worker for kill in kills]
    left = ExitCode.LEFT_WITH_NOTICE
    assert [event["of"] for event in events if event["event"] == "fault"] == gone
    assert exits_of(events) == {worker: left if worker in gone else 0 for worker in exits_of(events)}
    assert sorted(out_of(events)) == sorted(gone)
    assert redone(events, job) == []


def redone(events: Sequence[Event], job: Job) -> list[str]:
    """Returns the forwards and backwards that a step has more than once, without redundant forwards."""
    ran: Counter[tuple[int, str]] = Counter()
    for event in events:
        if event["event"] == "action" and (match := re.fullmatch(r"\d+([FfBIW])\d+(@\d+)?", event["action"])):
            ran[event["step"], event["action"]] += 1
            if match[1] in "fIW":
                ran[event["step"], event["action"]] += 1
    redundant = 2 if job.redundancy == "eager" else 1
    return [f"{step}: {action}" for (step, action), times in ran.items() if times > (redundant if "F" in action else 1)]


@pytest.mark.parametrize("setting", [soaked("mlp-lazy"), soaked("gpt-lazy"), "mlp-reroute-x2"])
def test_who_is_warned_too_late_is_one_that_was_killed(runs: Runs, setting: str) -> None:
    job = job_of(setting)
    kills = plan_kills(job, [Sort(Op.F, "during", "first"), Sort(Op.B, "after", "middle")], 3, between=STEPS_TO_LEAVE)
    faults = [fault(kill.text, job, "terminate", grace_ns=1_000_000) for kill in kills]
    ending, events = runs.run(job, faults)
    check(runs, job, ending, events)
    assert list(lives(events, [kill.worker for kill in kills])) == []
    assert out_of(events) == [kill.worker for kill in kills]


@pytest.mark.parametrize(
    ("action", "redundancy"),
    [
        *(("1:SEND_B:2:after", "reroute"), ("2:COMMIT:before", "lazy")),
        *(soaked("0:F:1:during", "lazy"), soaked("0:F:1:during", "reroute")),
        *(soaked("1:SEND_B:2:after", "lazy"), soaked("2:COMMIT:before", "reroute")),
    ],
)
def test_whoever_stands_still_too_long_is_put_out(runs: Runs, action: str, redundancy: Redundancy) -> None:
    job = Job(**SMALL, redundancy=redundancy, pipelines=2 if redundancy == "reroute" else 1)
    stage = int(action[0])
    ending, events = runs.run(job, [fault(f"3:{action}", job, "stop")], silent_after=SILENCE)
    check(runs, job, ending, events)
    assert out_of(events) == [stage]
    assert {worker for worker, code in exits_of(events).items() if code == -signal.SIGKILL} == {stage}
    assert "has been silent for" in [event for event in events if event["event"] == "epoch"][-1]["reason"]


def test_short_pauses_put_nobody_out(runs: Runs) -> None:
    job = Job(**SMALL)
    pauses = [
        fault(f"{step}:{stage}:{op}:{when}", job, "stop", for_ns=400_000_000)
        for step, stage, op, when in [(1, 0, "F:2", "before"), (2, 1, "B:1", "during"), (4, 2, "LOG", "after")]
    ]
    ending, events = runs.run(job, pauses, silent_after=SILENCE)
    check(runs, job, ending, events)
    assert out_of(events) == []
    assert set(exits_of(events).values()) == {0}


def test_whoever_spins_with_a_live_heart_is_put_out_by_its_lack_of_progress(runs: Runs) -> None:
    # The first call is the probe that learns the shapes. The heir makes fewer calls than this.
    call = 1 + 5 * SMALL["microbatches"] + 2
    job = Job(**SPINNING, model_args={"call": call})
    twin = replace(job, model_args={})
    ending, events = runs.run(job, hang_after="300ms")
    assert list(differences(ending, runs.twin(twin))) == []
    assert (out_of(events), exits_of(events)) == ([1], {0: 0, 1: -signal.SIGKILL, 2: 0})
    epoch = [event for event in events if event["event"] == "epoch"][-1]
    assert "hangs for" in epoch["reason"]
    assert "of step 5" in epoch["reason"]
    assert list(actions_of(events, 1, 5))[-1] == "1RECV_F2"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "hang",
            r"worker 1 hangs for \S+ s \(limit \S+ s\) in 2F3 of step 1, as worker 2 did: it comes from the user's",
        ),
        ("exit", "worker 1 exited with code 1 in 2F3 of step 1, as worker 2 did: it comes from the user's code, "),
        soaked(
            "SystemExit",
            r"in layer 2 \(after\), microbatch 3 of pipeline 0: SystemExit: 3 .*/kill_models.* it is the model, not a",
        ),
        (
            "KeyboardInterrupt",
            r"in layer 2 \(after\), microbatch 3 of pipeline 0: KeyboardInterrupt .* it is the model, not a worker",
        ),
    ],
)
def test_a_layer_that_ends_each_heir_in_the_same_way_is_the_cause(runs: Runs, how: str, words: str) -> None:
    """An heir's hang early in its program was not judged; the others ended with 80 and the advice of more copies."""
    job = Job(**{**SPINNING, "model": "tests.e2e.kill_models:ending", "model_args": {"how": how}})
    ending, _ = runs.run(job, hang_after="300ms")
    assert (ending.exit_code, len(ending.view.run_state.losses)) == (ExitCode.NOT_RECOVERED, 1), ending.error
    assert re.match(words, str(ending.error))
    if how in ("hang", "exit"):
        assert "look at layer 2 (after) or the loss; worker 2 (pid" in str(ending.error)
    if how == "hang":
        note = r"worker 2 hangs for \S+ s \(limit \S+ s\) in 2F3 of step 1 and is evicted; worker 1 takes over"
        first, *others = ending.view.run_state.notes
        assert re.fullmatch(note, first)
        assert others == ["step 0 is not kept as a checkpoint: not all of its parts were written"], "an owner hangs"


def test_whoever_is_slow_is_waited_for(runs: Runs) -> None:
    job = Job(**{**SMALL, "model": "timed", "model_args": {"forward_ms": 4, "backward_ms": 4, "layers": 3}})
    slow = fault("1:1:F:0:before", job, "slow", factor=15.0, for_ns=200_000_000)
    hung = fault("5:2:B:1:before", job, "hang", for_ns=700_000_000)
    ending, events = runs.run(job, [slow, hung], silent_after=SILENCE, hang_after="4s")
    check(runs, job, ending, events)
    assert out_of(events) == []
    assert set(exits_of(events).values()) == {0}
