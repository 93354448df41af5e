"""Expectations against made-up runs: what passes, what fails, what proves nothing; and the exit code of a case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.core.checks import expectations as strike_accuracy
from engine.core.checks.expectations import (
    Check,
    HostStrike,
    Observation,
    OutsideView,
    check,
    decided,
    exit_code,
    holds_anyway,
    verdict,
    why_no_twin,
)
from engine.core.checks.proof import compare
from engine.core.checks.trajectory import TrajectoryRow
from engine.core.errors import BambooError, ExitCode
from engine.core.exclusion import Cause, Exclusion
from engine.core.faults.fault import HOST_KINDS, At, Fault, Host, InStep, Owner, Role, When, Worker
from engine.core.faults.scenario import Expect, Limits
from engine.core.history.process_records import RestartRecord, StartedRecord
from engine.core.history.run_history import RunHistory, history_of
from engine.core.history.run_records import ConfirmedRecord, EpochRecord, FaultRecord, Record
from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from tests.core.made_records import made_history
from tests.core.scenario_cases import KINDS, at
from tests.looped import looped

JOB = Job(stages=2, microbatches=1, steps=2)
FAULT = Fault("first", at(1, "1B0"), (Owner(0, 1),))
ROWS = [TrajectoryRow(step, layer, "state", "buffers", 0.5) for step in range(2) for layer in range(2)]
Event = dict[str, Any]


def did(worker: int, step: int, end_ns: int, *actions: str) -> list[Event]:
    return [
        {"event": "action", "worker": worker, "step": step, "action": action, "start_ns": end_ns, "end_ns": end_ns}
        for action in actions
    ]


def of_agent(event: str, at_ns: int, **fields: Any) -> Event:
    return {"event": event, "worker": -1, "at_ns": at_ns, **fields}


def epoch(number: int, at_ns: int, owners: list[int], *verdict: list[Any]) -> Event:
    fields = {"epoch": number, "owners": owners, "verdict": list(verdict), "reason": "x"}
    return of_agent("epoch", at_ns, members=[0, 1], **fields)


STRUCK = of_agent("fault", 1_000_000, fault="first", of=1, do="kill")
CONFIRMED = of_agent("confirmed", 1_000_002, fault="first", how="exit: -9")
EXIT = of_agent("exit", 2_000_000, of=1, code=-9, expected=False, seen_ns=2_000_000)
VERDICT = epoch(2, 3_000_000, [0, 0], [1, "was killed (SIGKILL)"])
EVENTS: list[Event] = [
    {"event": "job", "stages": 2},
    *(of_agent("started", 0, of=worker, slots=[[0, worker]]) for worker in range(2)),
    epoch(1, 1, [0, 1]),
    of_agent("go", 2, epoch=1),
    *did(0, 0, 10, "0F0", "0B0"),
    *did(1, 0, 10, "1F0", "1B0"),
    of_agent("commit", 100, step=0),
    *did(0, 1, 200, "0F0"),
    *did(1, 1, 200, "1F0"),
    STRUCK,
    EXIT,
    CONFIRMED,
    VERDICT,
    of_agent("plan", 4_000_000, epoch=2, committed=0),
    of_agent("go", 5_000_000, epoch=2),
    *did(0, 1, 6_000_000, "1F0", "1B0", "0B0"),
    of_agent("commit", 9_000_000, step=1),
]
HISTORY = made_history(EVENTS)
SAME = compare(ROWS, ROWS, HISTORY)
SEEN = Observation(0, "", HISTORY, SAME, ())
ALL = Expect("recovered", "identical", 0, "exactly-once", "exact", "none", Limits(10**9, 10**9, {"detect": 10**8}))


def checked(expect: Expect = ALL, seen: Observation = SEEN, faults: tuple[Fault, ...] = (FAULT,)) -> dict[str, Check]:
    return {each.name: each for each in check(expect, JOB, faults, KINDS, seen)}


def without(*events: Event) -> list[Event]:
    return [event for event in EVENTS if event not in events]


def history_without(*events: Event) -> RunHistory:
    return made_history(without(*events))


def test_a_case_in_which_everything_is_as_expected() -> None:
    found = checked()
    assert {name: each.result for name, each in found.items()} == dict.fromkeys(found, "passed")
    assert list(found) == [
        *("faults", "outcome", "trajectory", "steps_lost", "samples", "culprit", "leftovers"),
        *("recovery.p95", "recovery.max", "recovery.phases.detect"),
    ]
    assert found["recovery.phases.detect"].text == "1.0 ms, 100ms at most"
    assert found["trajectory"].text == "identical in 2 of 80 steps"
    assert found["culprit"].text == "evicted: worker 1"
    assert verdict(tuple(found.values())) == "passed"
    assert exit_code(tuple(found.values()), SEEN) == ExitCode.OK


def test_of_a_run_that_was_struck_before_only_what_came_since_is_judged() -> None:
    """Before: step 0 is miscounted, worker 7 is put out without a fault, and step 0 is lost."""
    since_ns = STRUCK["at_ns"]
    before = [
        *did(0, 0, 20, "0F0"),
        of_agent("exit", 110, of=7, code=-9, expected=False, seen_ns=110),
        epoch(2, 120, [0, 1], [7, "was silent"]),
        of_agent("go", 900_000, epoch=2),
        of_agent("commit", 900_001, step=0),
    ]
    events = sorted([*EVENTS, *before], key=lambda each: int(each.get("at_ns", each.get("end_ns", 0))))
    expect = Expect(samples="exactly-once", culprit="exact", steps_lost=0)
    whole = replace(SEEN, history=made_history(events))
    found = {name: each.result for name, each in checked(expect, whole).items()}
    assert found == dict.fromkeys(found, "passed") | dict.fromkeys(("samples", "culprit", "steps_lost"), "failed")
    seen = replace(whole, since_ns=since_ns)
    found = {name: each.result for name, each in checked(expect, seen).items()}
    assert found == dict.fromkeys(found, "passed")
    (recovery,) = seen.recoveries
    assert recovery.heirs == (((0, 1), 1, 0),)


ANYWAY = "outcome recovered, trajectory identical, steps_lost 0, samples exactly-once, culprit nobody, leftovers none"


@looped(
    ("expect", "done", "is_unmoved", "named"),
    [
        (ALL, {"kill"}, False, ""),
        (replace(ALL, steps_lost=1), {"kill"}, False, ""),
        (replace(ALL, steps_lost=2), {"kill"}, False, "steps_lost 2"),  # of two steps
        (Expect(culprit="exact"), {"slow"}, False, "culprit exact"),
        (Expect(culprit="exact"), {"slow", "kill"}, False, ""),
        (Expect(culprit="nobody"), {"slow"}, False, ""),
        (Expect(), {"noop"}, False, "outcome recovered"),
        (Expect(outcome="state-lost"), {"noop"}, False, ""),
        (replace(ALL, culprit="nobody"), {"slow"}, True, ANYWAY),
        (replace(ALL, culprit="nobody"), {"noop-host"}, False, ANYWAY),
    ],
)
def test_an_expectation_that_tells_nothing_of_the_faults_is_named(
    expect: Expect, done: set[str], is_unmoved: bool, named: str
) -> None:
    which = "these expectations hold" if "," in named else "this expectation holds"
    expected = [f"{which} without any fault: {named}"] if named else []
    assert holds_anyway(expect, JOB, done, KINDS, is_unmoved=is_unmoved) == expected


def test_a_fault_that_moved_nobody_is_told_with_what_it_does_not_prove() -> None:
    """A slow worker that nobody noticed passed without a word, like the run without it."""
    slow, nobody = replace(FAULT, do="slow"), replace(ALL, culprit="nobody", recovery=None)
    calm = made_history([*without(EXIT, VERDICT), *did(1, 1, 6_000_000, "1B0")])
    said = f"the fault struck; these expectations hold without any fault: {ANYWAY}"
    seen = replace(SEEN, history=calm)
    assert checked(replace(nobody, samples=None), seen, (slow,))["faults"].text == said.replace(
        "samples exactly-once, ", ""
    )
    assert checked(nobody, replace(seen, leftovers=["pid 7"]), (slow,))["faults"].text == "the fault struck"
    assert checked()["faults"].text == "the fault struck"


def test_what_is_not_expected_is_not_looked_at() -> None:
    assert list(checked(Expect())) == ["faults", "outcome"]


@looped(
    ("name", "seen", "result", "text"),
    [
        (
            "faults",
            {"history": history_without(STRUCK, CONFIRMED)},
            "invalid",
            "first did not strike (kill before 1B0 of step 1)",
        ),
        (
            "faults",
            {"history": history_without(CONFIRMED)},
            "invalid",
            "first struck, but its effect was not seen (kill)",
        ),
        ("outcome", {"exit_code": 3, "error": "why\nmore"}, "failed", "not recovered, but recovered was expected: why"),
        ("outcome", {"exit_code": 80}, "failed", "state-lost, but recovered was expected"),
        ("outcome", {"exit_code": 130}, "invalid", "the run was interrupted"),
        ("outcome", {"exit_code": 74}, "invalid", "the run ended with exit code 74"),
        ("trajectory", {"twin": None}, "invalid", "not compared: there is no twin to compare with"),
        (
            "trajectory",
            {"twin": compare(ROWS[:2], ROWS, HISTORY)},
            "invalid",
            "compared up to step 0, committed up to 1",
        ),
        ("trajectory", {"twin": compare([], ROWS, HISTORY)}, "invalid", "compared up to step -1, committed up to 1"),
        (
            "trajectory",
            {"twin": compare([*ROWS[:3], replace(ROWS[3], state="other")], ROWS, HISTORY)},
            "failed",
            "the weights are not those of the fault-free twin: step 1, layer 1: different weights or optimizer state, "
            "other in this run",
        ),
        (
            "samples",
            {"history": made_history([*did(0, 1, 7, "1B0"), *EVENTS])},
            "failed",
            "step 1: worker 0 counted the backward",
        ),
        (
            "culprit",
            {"history": made_history([*EVENTS, epoch(3, 9_900_000, [0, 0], [0, "was silent"])])},
            "failed",
            "worker 0 was evicted, and should not have been",
        ),
        (
            "culprit",
            {"history": history_without(EXIT, VERDICT)},
            "failed",
            "worker 1 was struck, and no verdict names it",
        ),
        ("leftovers", {"leftovers": None}, "invalid", "not checked"),
        ("leftovers", {"leftovers": ["pid 7", "port 8"]}, "failed", "pid 7, and 1 more"),
    ],
)
def test_what_else_may_come_of_it(name: str, seen: dict[str, Any], result: str, text: str) -> None:
    found = checked(seen=replace(SEEN, **seen))[name]
    assert found.result == result
    assert found.text.startswith(text)


def test_where_fewer_steps_are_hashed_only_those_are_compared() -> None:
    expect = Expect(trajectory="as far as hashed")
    found = {
        name: checked(expect, replace(SEEN, twin=compare(ROWS[:number], ROWS, HISTORY)))["trajectory"].result
        for name, number in (("all", 4), ("some", 2), ("none", 0))
    }
    assert found == {"all": "passed", "some": "passed", "none": "invalid"}


def test_a_twin_that_did_not_finish_gives_its_exit_code_unless_a_check_is_worse() -> None:
    """A case that was interrupted in its twin ended with 6, as if a fault had not struck."""
    error = BambooError("the twin\nmore")
    error.exit_code = ExitCode.INTERRUPTED
    seen = replace(SEEN, twin=error)
    checks = check(ALL, JOB, (FAULT,), KINDS, seen)
    assert (checks[2].result, checks[2].text, exit_code(checks, seen)) == ("invalid", "not compared: the twin", 130)
    missed = replace(seen, history=history_without(STRUCK, CONFIRMED))
    assert exit_code(check(Expect(trajectory="identical"), JOB, (FAULT,), KINDS, missed), missed) == 130
    miscounted = replace(seen, history=made_history([*did(0, 1, 7, "1B0"), *EVENTS]))
    assert exit_code(check(ALL, JOB, (FAULT,), KINDS, miscounted), miscounted) == 1


def test_a_twin_is_run_only_where_it_can_prove_something() -> None:
    wanted = Expect(trajectory="identical")
    assert why_no_twin(wanted, (FAULT,), SEEN) == ""
    assert why_no_twin(wanted, (), SEEN) == ""
    assert why_no_twin(replace(wanted, outcome="state-lost"), (FAULT,), replace(SEEN, exit_code=80)) == ""
    assert why_no_twin(Expect(), (FAULT,), SEEN) == "no twin was asked for"
    assert why_no_twin(wanted, (FAULT,), replace(SEEN, exit_code=80)) == "the run did not end as expected"
    assert why_no_twin(wanted, (FAULT,), replace(SEEN, exit_code=130)) == "the run was interrupted"
    missed = replace(SEEN, history=history_without(STRUCK, CONFIRMED))
    assert why_no_twin(wanted, (FAULT,), missed) == "no fault struck"


def test_half_a_backward_that_did_not_strike_after_a_failure_says_why() -> None:
    half = Fault("second", at(1, "0I0"), (Owner(0, 0),))
    text = checked(faults=(FAULT, half))["faults"].text
    assert text.endswith("of step 1) (once a worker is lost, backwards are whole: B instead of I and W)")
    text = checked(faults=(FAULT, half), seen=replace(SEEN, history=history_without(STRUCK, CONFIRMED)))["faults"].text
    assert text.endswith("of step 1)")


def test_limits_of_time() -> None:
    found = checked(Expect(recovery=Limits(1, 10**9, {"detect": 999_999, "plan": 10**9})))
    assert found["recovery.p95"] == Check(
        "recovery.p95", "failed", "training stalled for at least 5.0 ms, at most 9.0 ms; 0.001us allowed"
    )
    assert (found["recovery.max"].result, found["recovery.phases.detect"].result) == ("passed", "failed")
    between = checked(Expect(recovery=Limits(max_ns=7_000_000)))
    assert between["recovery.max"].result == "invalid"  # no step is usual yet, so only bounds are known
    none = checked(Expect(recovery=Limits(1)), replace(SEEN, history=made_history(EVENTS[:8])))
    assert none["recovery"].result == "invalid"


def test_a_phase_that_did_not_happen_proves_nothing() -> None:
    assert checked(Expect(recovery=Limits(phases_ns={"fence": 1})))["recovery.phases.fence"].result == "invalid"


def test_all_victims_must_be_struck() -> None:
    both = replace(FAULT, victims=(Owner(0, 0), Owner(0, 1)))
    assert checked(faults=(both,))["faults"].text == "first struck 1 of 2"


def test_whoever_left_with_notice_or_ended_when_the_run_halted_has_been_named() -> None:
    expect = Expect(culprit="exact")
    left = [*without(EXIT, VERDICT), of_agent("notice", 2_000_000, of=1, grace_s=60.0)]
    assert checked(expect, replace(SEEN, history=made_history(left)))["culprit"].result == "passed"
    halted = [*without(VERDICT, EXIT), {**EXIT, "expected": True}]
    assert checked(expect, replace(SEEN, history=made_history(halted), exit_code=80))["culprit"].result == "passed"
    assert checked(expect, replace(SEEN, history=made_history(halted)))["culprit"].result == "failed"


def test_whoever_is_struck_with_what_ends_nobody_may_stay_or_go() -> None:
    stop = replace(FAULT, do="stop")
    assert checked(Expect(culprit="exact"), faults=(stop,))["culprit"].result == "passed"
    stays = replace(SEEN, history=history_without(EXIT, VERDICT))
    assert checked(Expect(culprit="exact"), stays, (stop,))["culprit"].text == "evicted: nobody"
    assert checked(Expect(culprit="nobody"), stays, (stop,))["culprit"].result == "passed"
    assert checked(Expect(culprit="nobody"), faults=(stop,))["culprit"].result == "failed"


@looped(
    ("expected", "code", "result", "exits"),
    [
        ("recovered", 0, "passed", 0),
        ("state-lost", 80, "passed", 0),
        ("resumable", 75, "passed", 0),
        ("recovered", 3, "failed", 3),
        ("recovered", 70, "failed", 3),
        ("recovered", 80, "failed", 80),
        ("state-lost", 0, "failed", 1),
        ("recovered", 130, "invalid", 130),
        ("recovered", 4, "invalid", 4),
    ],
)
def test_the_exit_code_of_a_case(expected: Any, code: int, result: str, exits: int) -> None:
    seen = replace(SEEN, exit_code=code)
    checks = check(Expect(expected), JOB, (FAULT,), KINDS, seen)
    assert checks[1].result == result
    assert exit_code(checks, seen) == exits


@looped(
    ("error", "notice", "code", "result", "text"),
    [
        ("the loss is nan at step 1", "not-finite", 1, "passed", "noticed (not-finite)"),
        ("step 1: layer 0 differs", "replicas-differ", 70, "failed", "noticed (replicas-differ), but noticed (not-fin"),
        ("the fork server has ended", "", 70, "failed", "not recovered, but noticed (not-finite) was expected: the fo"),
        ("the fork server has ended", "", 1, "failed", "not recovered, but noticed"),
        ("", "", 0, "failed", "recovered, but noticed (not-finite) was expected"),
        ("the loss is nan at step 1", "not-finite", 0, "failed", "recovered, but noticed"),
    ],
)
def test_a_run_must_notice_what_the_scenario_names(error: str, notice: str, code: int, result: str, text: str) -> None:
    """Before, any end with code 1 or 70 passed, also "the fork server has ended"."""
    failed = [of_agent("failed", 4_000_000, error=error, notice=notice)] if error else []
    seen = replace(SEEN, exit_code=code, error=error, history=made_history([*EVENTS, *failed]))
    found = check(Expect("noticed", notice="not-finite"), JOB, (FAULT,), KINDS, seen)[1]
    assert (found.name, found.result) == ("outcome", result)
    assert found.text.startswith(text)


def test_a_run_that_should_recover_tells_what_it_noticed() -> None:
    failed = of_agent("failed", 4_000_000, error="the loss is nan", notice="not-finite")
    seen = replace(SEEN, exit_code=1, error="the loss is nan", history=made_history([*EVENTS, failed]))
    found = check(Expect(), JOB, (FAULT,), KINDS, seen)[1]
    assert found.text == "noticed (not-finite), but recovered was expected: the loss is nan"


def test_failed_counts_more_than_invalid_and_invalid_is_never_passed() -> None:
    missed = replace(SEEN, history=history_without(CONFIRMED))
    checks = check(Expect(), JOB, (FAULT,), KINDS, missed)
    assert (verdict(checks), exit_code(checks, missed)) == ("invalid", ExitCode.INVALID_CASE)
    failed = replace(missed, exit_code=80)
    checks = check(Expect(), JOB, (FAULT,), KINDS, failed)
    assert (verdict(checks), exit_code(checks, failed)) == ("failed", ExitCode.STATE_LOST)
    left = replace(SEEN, leftovers=["pid 7"])
    checks = check(Expect(leftovers="none"), JOB, (FAULT,), KINDS, left)
    assert (verdict(checks), exit_code(checks, left)) == ("failed", ExitCode.EXPECTATION_FAILED)


# Precision: a fault struck where its scenario said, by what its victim recorded; a strike beside it is found.


STRUCK_JOB = Job(stages=3, microbatches=2, steps=3)
PROGRAM = [str(action) for action in initial_program(STRUCK_JOB)[0][1]]  # of worker 1
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
    return precision(STRUCK_JOB, [fault], [*events, strike])


@pytest.mark.parametrize(
    ("num_done", "num_later", "when"),
    [(NAMED, 0, "before"), (NAMED + 1, 0, "after"), (NAMED, 0, "during"), (NAMED, 1, "during")],
)
def test_where_it_was_to_strike(num_done: int, num_later: int, when: When) -> None:
    check = run(num_done, num_later, when)
    assert (check.result, check.text) == ("passed", "1 fault struck at the planned action")


@looped(
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
    assert precision(STRUCK_JOB, [fault], events).result == result
    here = [{"event": "host", **own, "node": "b"}, strike | told]  # its records would be here
    assert precision(STRUCK_JOB, [fault], here).result == "failed"


def test_whom_a_fault_does_not_end_goes_on() -> None:
    assert run(NAMED, 3, "before", "stop").result == "passed"


def test_the_first_action_of_a_step_follows_the_last_of_the_step_before() -> None:
    first = Fault("f", At(1, initial_program(STRUCK_JOB)[0][1][0], "before"), (Owner(0, 1),))
    done = [
        {"event": "action", "worker": 1, "step": 0, "action": text, "end_ns": number}
        for number, text in enumerate(PROGRAM)
    ]
    strike = {"event": "fault", "fault": "f", "of": 1, "slot": [0, 1], "at_ns": 99}
    assert precision(STRUCK_JOB, [first], [*done, strike]).result == "passed"
    assert precision(STRUCK_JOB, [first], [*done[:-1], strike]).result == "failed"


def test_after_a_recovery_only_the_named_action_is_looked_at() -> None:
    fault = Fault("f", at(1, "1B0"), (Owner(0, 1),))
    epoch = {"event": "epoch", "epoch": 2, "at_ns": 1}
    done = {"event": "action", "worker": 2, "step": 1, "action": "1f0", "end_ns": 2}
    strike = {"event": "fault", "fault": "f", "of": 2, "slot": [0, 1], "at_ns": 3}
    assert precision(STRUCK_JOB, [fault], [epoch, done, strike]).result == "passed"
    assert precision(STRUCK_JOB, [fault], [epoch, done | {"action": "1B0"}, strike]).result == "failed"


def test_whoever_is_not_the_owner_may_be_anywhere() -> None:
    fault = Fault("f", at(1, "1B0"), (Role("shadow"),))
    strike = {"event": "fault", "fault": "f", "of": 0, "slot": [0, 1], "at_ns": 3}
    assert not [*strike_accuracy.strike_accuracy(STRUCK_JOB, [fault], made_history([strike]))]


def test_a_second_victim_may_be_anywhere() -> None:
    fault = Fault("f", at(1, "1B0"), (Owner(0, 1), Owner(0, 2)))
    strike = {"event": "fault", "fault": "f", "of": 2, "slot": [0, 2], "at_ns": 3}
    assert not [*strike_accuracy.strike_accuracy(STRUCK_JOB, [fault], made_history([strike]))]


# The checks of a run whose hosts were struck: each of them fails on a run that lacks what it checks.


S = 1_000_000_000
HOST_FAULT = Fault("lost", InStep(3), (Host("other"),), "power-off")
STRIKE = HostStrike(HOST_FAULT, "h1", 3, 100 * S, (1, 2), ended_ns=5_000_000)
CODES = {"h0": 0, "h1": -9, "h2": 0}
STARTED = [StartedRecord(of=of, child=10 + of, slots=(), node=f"h{of // 2}") for of in range(4)]


def host_epoch(number: int, *out: int, cause: Cause = Cause.NODE_LOST) -> EpochRecord:
    verdict = tuple(Exclusion(each, "is out", cause) for each in out)
    more = {"members": (), "reason": "", "planned": False, "owners": (), "shadows": ()}
    return EpochRecord(epoch=number, verdict=verdict, **more)  # type: ignore[arg-type]


def results(
    records: Sequence[Record], strikes: Sequence[HostStrike] = (STRIKE,), codes: dict[str, int] | None = None
) -> dict[str, str]:
    """Returns the result of each check but those that passed."""
    run = struck_hosts(records, strikes, CODES if codes is None else codes)
    checks = check(Expect(trajectory=None, leftovers=None), JOB, [HOST_FAULT], {**KINDS, **HOST_KINDS}, run)
    return {each.name: each.result for each in checks if each.result != "passed"}


def struck_hosts(
    records: Sequence[Record], strikes: Sequence[HostStrike], codes: dict[str, int], code: int = 0
) -> Observation:
    every = [*records, *(record for strike in strikes for record in strike.records())]
    return Observation(code, "", history_of(every), outside=OutsideView(strikes, codes, 5 * S))


GOOD = [*STARTED, host_epoch(1), host_epoch(2, 1, 2)]


def test_a_run_that_loses_a_host_in_one_epoch_passes() -> None:
    assert results(GOOD) == {}
    assert results([*GOOD, host_epoch(3)]) == {}  # a take-over puts nobody out
    assert results([*GOOD, host_epoch(3, 0, cause=Cause.FINISHED)]) == {}


@looped(
    ("records", "check"),
    [
        ([*STARTED, host_epoch(1)], "epochs"),
        ([*STARTED, host_epoch(1, 1), host_epoch(2, 2)], "epochs"),
        ([*GOOD, host_epoch(3, 3)], "epochs"),
        ([*GOOD, host_epoch(3, 1, 2)], "epochs"),
        ([*GOOD, StartedRecord(of=3, child=99, slots=(), node="h1")], "processes"),
        ([*GOOD, StartedRecord(of=3, child=13, slots=(), node="h2")], "processes"),
        ([*GOOD, RestartRecord(number=1, reason="x")], "processes"),
    ],
)
def test_a_loss_that_is_told_otherwise_fails(records: Sequence[Record], check: str) -> None:
    assert results(records) == {check: "failed"}


def test_agents_end_as_they_have_to() -> None:
    assert results(GOOD, codes=CODES | {"h2": 69}) == {"agents": "failed"}
    assert results(GOOD, codes=CODES | {"h1": 85}) == {"agents": "failed"}
    cut = replace(STRIKE, fault=replace(HOST_FAULT, do="cut-host"), ended_ns=4 * S, spare_ns=S // 2)
    assert results(GOOD, [cut], CODES | {"h1": 85}) == {}
    led = replace(cut, ended_ns=6 * S)  # its member of etcd led, and answered one more renewal
    assert results(GOOD, [led], CODES | {"h1": 85}) == {}
    assert results(GOOD, [cut]) == {"agents": "failed"}
    for late in (replace(cut, spare_ns=-1), replace(cut, ended_ns=8 * S), replace(cut, spare_ns=None)):
        assert results(GOOD, [late], CODES | {"h1": 85}) == {"lease": "failed"}


def test_a_fault_that_proved_nothing_makes_the_case_invalid() -> None:
    assert results([*STARTED, host_epoch(1)], [], CODES | {"h1": 0}) == {"faults": "invalid"}
    assert results(GOOD, [replace(STRIKE, ended_ns=None)]) == {"faults": "invalid"}


def test_an_interrupted_run_leaves_the_checks_of_hosts_undecided_but_for_the_strikes() -> None:
    run = struck_hosts([*STARTED, host_epoch(1)], [STRIKE], CODES, code=130)
    seen = check(Expect(), JOB, [HOST_FAULT], {**KINDS, **HOST_KINDS}, run)
    assert exit_code(seen, run) == 130
    checks = decided(seen, run)
    assert {each.name: each.result for each in checks if each.result != "not judged"} == {"faults": "passed"}
    assert {"epochs", "processes", "agents"} <= {each.name for each in checks}


def test_who_is_lost_and_what_is_recorded() -> None:
    worker = HostStrike(Fault("w", InStep(3), (Worker(2),), "kill-worker"), "h1", 3, 7, (1, 2), 5)
    leader = replace(STRIKE, fault=replace(HOST_FAULT, do="kill-etcd-leader"))
    assert (STRIKE.lost, worker.lost, leader.lost) == ((1, 2), (2,), ())
    first, second, last = STRIKE.records()
    assert isinstance(first, FaultRecord) and isinstance(second, FaultRecord) and isinstance(last, ConfirmedRecord)
    assert (first.of, second.of, first.at_ns, last.at_ns) == (1, 2, 100 * S, 100 * S + 5_000_000)
    lost = replace(worker, fault=replace(worker.fault, id="lost"))
    assert results([*STARTED, host_epoch(1), host_epoch(2, 2)], [lost]) == {"agents": "failed"}  # h1 has ended
