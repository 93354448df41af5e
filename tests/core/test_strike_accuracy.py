"""Precision: a fault struck where its scenario said, by what its victim recorded; a strike beside it is found."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.checks import expectations as strike_accuracy
from engine.core.checks.expectations import Check
from engine.core.faults.fault import At, Fault, Owner, Role, When
from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from tests.core.made_records import made_history
from tests.core.scenario_cases import at

JOB = Job(stages=3, microbatches=2, steps=3)
PROGRAM = [str(action) for action in initial_program(JOB)[0][1]]  # of worker 1
NAMED = PROGRAM.index("1B0")


def precision(job: Job, faults: list[Fault], events: list[dict[str, Any]]) -> Check:
    (found,) = strike_accuracy.strike_accuracy(job, faults, made_history(events))
    return found


def run(num_done: int, num_later: int = 0, when: When = "before", do: str = "kill", step: int = 1) -> Any:
    """Returns the check of a run whose worker 1 did so many actions of step 1 before the blow, and after it."""
    fault = Fault("f", at(step, "1B0", when), (Owner(0, 1),), do)
    whole = [(0, text) for text in PROGRAM] + [(1, text) for text in PROGRAM]
    events: list[dict[str, Any]] = []
    for number, (of_step, text) in enumerate(whole[: len(PROGRAM) + num_done + num_later]):
        blow = 5 if number >= len(PROGRAM) + num_done else 0
        events.append({"event": "action", "worker": 1, "step": of_step, "action": text, "end_ns": number + blow})
    strike = {"event": "fault", "fault": "f", "of": 1, "slot": [0, 1], "at_ns": len(PROGRAM) + num_done + 1}
    return precision(JOB, [fault], [*events, strike])


@pytest.mark.parametrize(
    ("num_done", "num_later", "when"),
    [(NAMED, 0, "before"), (NAMED + 1, 0, "after"), (NAMED, 0, "during"), (NAMED, 1, "during")],
)
def test_where_it_was_to_strike(num_done: int, num_later: int, when: When) -> None:
    check = run(num_done, num_later, when)
    assert (check.result, check.text) == ("passed", "1 struck where the scenario says")


@pytest.mark.parametrize(
    ("num_done", "num_later", "when"),
    [
        (NAMED - 1, 0, "before"),
        (NAMED + 1, 0, "before"),
        (NAMED, 1, "before"),
        (NAMED, 0, "after"),
        (NAMED + 2, 0, "after"),
        (NAMED + 1, 1, "after"),
        (NAMED + 1, 0, "during"),
        (NAMED - 1, 0, "during"),
        (NAMED, 2, "during"),
    ],
)
def test_elsewhere(num_done: int, num_later: int, when: When) -> None:
    check = run(num_done, num_later, when)
    assert check.result == "failed"
    assert f"{when} 1B0 of step 1" in check.text


@pytest.mark.parametrize(
    ("done", "result"), [(PROGRAM[NAMED - 1], "passed"), (PROGRAM[NAMED], "failed"), ("", "failed")]
)
def test_a_victim_on_another_host_has_told_its_last_action(done: str, result: str) -> None:
    fault = Fault("f", at(1, "1B0", "before"), (Owner(0, 1),))
    own = {"cpu": "", "cores": 1, "python": "", "torch": "", "began": ""}
    strike = {"event": "fault", "fault": "f", "of": 1, "slot": [0, 1], "at_ns": 9, "node": "b"}
    told = {"done_step": 1, "done": done} if done else {}
    events = [{"event": "host", **own, "node": "a"}, strike | told]
    assert precision(JOB, [fault], events).result == result
    here = [{"event": "host", **own, "node": "b"}, strike | told]  # its records would be here
    assert precision(JOB, [fault], here).result == "failed"


def test_whom_a_fault_does_not_end_goes_on() -> None:
    assert run(NAMED, 3, "before", "stop").result == "passed"


def test_the_first_action_of_a_step_follows_the_last_of_the_step_before() -> None:
    first = Fault("f", At(1, initial_program(JOB)[0][1][0], "before"), (Owner(0, 1),))
    done = [
        {"event": "action", "worker": 1, "step": 0, "action": text, "end_ns": number}
        for number, text in enumerate(PROGRAM)
    ]
    strike = {"event": "fault", "fault": "f", "of": 1, "slot": [0, 1], "at_ns": 99}
    assert precision(JOB, [first], [*done, strike]).result == "passed"
    assert precision(JOB, [first], [*done[:-1], strike]).result == "failed"


def test_after_a_recovery_only_the_named_action_is_looked_at() -> None:
    fault = Fault("f", at(1, "1B0"), (Owner(0, 1),))
    epoch = {"event": "epoch", "epoch": 2, "at_ns": 1}
    done = {"event": "action", "worker": 2, "step": 1, "action": "1f0", "end_ns": 2}
    strike = {"event": "fault", "fault": "f", "of": 2, "slot": [0, 1], "at_ns": 3}
    assert precision(JOB, [fault], [epoch, done, strike]).result == "passed"
    assert precision(JOB, [fault], [epoch, done | {"action": "1B0"}, strike]).result == "failed"


def test_whoever_is_not_the_owner_may_be_anywhere() -> None:
    fault = Fault("f", at(1, "1B0"), (Role("shadow"),))
    strike = {"event": "fault", "fault": "f", "of": 0, "slot": [0, 1], "at_ns": 3}
    assert not [*strike_accuracy.strike_accuracy(JOB, [fault], made_history([strike]))]


def test_a_second_victim_may_be_anywhere() -> None:
    fault = Fault("f", at(1, "1B0"), (Owner(0, 1), Owner(0, 2)))
    strike = {"event": "fault", "fault": "f", "of": 2, "slot": [0, 2], "at_ns": 3}
    assert not [*strike_accuracy.strike_accuracy(JOB, [fault], made_history([strike]))]
