"""The result of a case: its words, exit codes and claims; and the options of a run about its failures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from bamboo_cli.run_options import grace_seconds, scenario_of
from bamboo_cli.tables import RESULT_STYLES
from engine.core.checks.expectations import Observation
from engine.core.checks.recoveries import Recovery, Stall
from engine.core.errors import BambooError, ExitCode, UserError
from engine.core.exclusion import Cause, excluded
from engine.core.faults.scenario import Expect, Scenario
from engine.core.history.process_records import (
    CheckRecord,
    ComparisonRecord,
    Difference,
    EndedRecord,
    Result,
    VerdictRecord,
)
from engine.core.job.job import Job
from engine.harness.case import CaseResult, judged
from tests.core.made_records import made_history
from tests.kills import parse_kill

JOB = Job(stages=3, steps=9)
FAULT = parse_kill("5:2:B:3", JOB)
RECOVERY = Recovery(
    1,
    5,
    "",
    (excluded(2, Cause.DEATH, "died"),),
    {2: None},
    (),
    (FAULT.id,),
    0,
    {"detect": 0, "replay": 120_000_000},
    1,
    stall=Stall(120_000_000, 120_000_000),
)
SCENARIO = Scenario("", "", JOB, (), Expect(trajectory="as far as hashed"))
SUMMARY = {"steps": 9, "outcome": "finished", "exit_code": 0, "error": None}
STRUCK: list[dict[str, Any]] = [
    {"event": "job", "stages": 3},
    *({"event": "started", "of": worker, "slots": [[0, worker]]} for worker in range(3)),
    {"event": "go", "epoch": 0, "at_ns": 0},
    {"event": "commit", "step": 0, "at_ns": 1},
    {"event": "action", "worker": 2, "step": 5, "action": "2RECV_B3", "start_ns": 2, "end_ns": 3},
    {"event": "fault", "fault": FAULT.id, "of": 2, "slot": None, "at_ns": 3},
    {"event": "confirmed", "fault": FAULT.id, "at_ns": 4},
]


DIFFERENCE = Difference(5, 1, "buffers", "", "0a", "0b")


def same(compared: int, last_step: int, difference: Difference | None = None) -> ComparisonRecord:
    return ComparisonRecord(compared=compared, steps=9, last_step=last_step, difference=difference, disturbed=5)


def result_of(
    twin: ComparisonRecord | BambooError | None = None, fired: bool = True, expect: Expect = SCENARIO.expect
) -> CaseResult:
    seen = Observation(0, "", made_history(STRUCK if fired else STRUCK[:6]), twin)
    result = judged(replace(SCENARIO, expect=expect), (FAULT,), Path("x"), seen)
    return replace(result, recoveries=(RECOVERY,), summary=SUMMARY)


def test_weights_are_called_identical_only_when_they_were_compared() -> None:
    text = "worker 2 died; training stalled for 120 ms, 0 steps lost"
    assert result_of().recovery_lines() == [text]
    assert result_of(same(9, 8)).recovery_lines() == [f"{text}, weights identical"]
    assert result_of(same(8, 7)).recovery_lines() == [f"{text}, weights identical up to step 7"]
    assert result_of(same(0, -1)).recovery_lines() == [text]
    assert result_of(same(9, 8, DIFFERENCE)).recovery_lines() == [text]


def test_a_death_after_the_last_commit_needs_no_recovery() -> None:
    late = replace(RECOVERY, points_ns={"detect": 0}, resume_ns=None, after_end=True)
    found = replace(result_of(same(9, 8)), recoveries=(late,))
    assert found.recovery_lines() == [
        "worker 2 died; that was after the last commit, no step was left to recover, weights identical"
    ]


def test_a_run_passes_when_its_fault_struck_and_no_bit_differs() -> None:
    assert result_of(same(9, 8)).error is None
    assert result_of(expect=Expect()).error is None
    assert result_of(same(8, 7)).to_plain()["outcome"] == "finished"


def test_a_difference_fails_the_run_and_says_where() -> None:
    found = result_of(same(9, 8, DIFFERENCE)).to_plain()
    assert (found["exit_code"], found["outcome"]) == (ExitCode.EXPECTATION_FAILED, "failed")
    text = "step 5, layer 1: different buffers, 0a in this run and 0b in its twin"
    assert found["error"] == f"the weights are not those of the fault-free twin: {text}"


def test_a_fault_that_did_not_strike_makes_the_case_invalid() -> None:
    found = result_of(same(9, 8), fired=False)
    assert (found.to_plain()["exit_code"], found.to_plain()["outcome"]) == (ExitCode.INVALID_CASE, "invalid")
    text = "the case is invalid, nothing was proved: 5:2:B:3 did not strike (kill before 2B3 of step 5)"
    assert str(found.error) == text


def test_a_twin_that_failed_proves_nothing() -> None:
    error = BambooError("the twin")
    error.exit_code = ExitCode.NOT_RECOVERED
    found = result_of(error).to_plain()
    assert (found["twin"], found["exit_code"], found["outcome"]) == ({"error": "the twin"}, 3, "invalid")
    assert found["error"] == "the case is invalid, nothing was proved: not compared: the twin"


def test_a_run_that_was_interrupted_in_its_twin_has_not_failed() -> None:
    """It was told as failed, or as an invalid case."""
    error = BambooError("interrupted in the twin")
    error.exit_code = ExitCode.INTERRUPTED
    found = result_of(error)
    assert (found.verdict, found.verdict_word, found.error) == ("invalid", "interrupted", None)
    assert (found.ended.outcome, found.ended.exit_code) == ("interrupted", 130)
    assert found.to_plain()["twin"] == {"error": "interrupted in the twin"}


def test_a_run_that_failed_by_itself_says_its_own_error() -> None:
    error = BambooError("worker 2 raised")
    own = {**SUMMARY, "outcome": "failed", "exit_code": 3, "error": str(error)}
    found = result_of(fired=False)
    found = replace(
        found, run_error=error, summary=own, observation=replace(found.observation, exit_code=3, error=str(error))
    )
    assert found.error is error
    assert {name: found.to_plain()[name] for name in own} == own


def test_the_summary_has_plain_values() -> None:
    said = result_of(same(9, 8)).to_plain()
    assert json.loads(json.dumps(said))["faults"] == [{"fault": "5:2:B:3", "fired": True}]
    assert said["twin"] == {"steps_compared": 9, "difference": None}
    assert said["recoveries"][0]["stall_ms"] == 120.0
    assert result_of().to_plain()["twin"] is None


def test_the_records_of_a_case_end_with_what_the_command_ends_with() -> None:
    """A run that failed its comparison used to be recorded as finished, with exit code 0."""
    found = result_of(same(9, 8, DIFFERENCE))
    *checks, verdict = found.records("request-1.json")
    assert [(each.name, each.result) for each in checks if isinstance(each, CheckRecord)] == [
        ("faults", "passed"),
        ("outcome", "passed"),
        ("trajectory", "failed"),
    ]
    assert verdict == VerdictRecord(result="failed", exit_code=1, request="request-1.json")
    assert found.ended == EndedRecord(outcome="failed", exit_code=1)
    assert replace(found, is_scenario=True).ended == found.ended
    assert result_of(same(9, 8)).ended == EndedRecord(outcome="finished", exit_code=0)
    assert replace(result_of(same(9, 8)), is_scenario=True).ended == EndedRecord(outcome="passed", exit_code=0)


@pytest.mark.parametrize(
    ("steps", "difference", "goes_on"), [(9, None, False), (9, DIFFERENCE, False), (12, None, True)]
)
def test_only_a_run_with_steps_left_and_right_weights_goes_on(
    steps: int, difference: Difference | None, goes_on: bool
) -> None:
    """After a finished run with wrong weights `--resume` was the next step that the user was told."""
    found = replace(result_of(same(9, 8, difference)), summary={**SUMMARY, "steps": 9})
    assert found.may_go_on(steps) == goes_on
    assert not replace(result_of(same(9, 8, DIFFERENCE)), summary={**SUMMARY, "steps": 9}).may_go_on(12)


def test_a_scenario_that_expects_a_failure_passes_with_it() -> None:
    found = result_of(expect=Expect(outcome="state-lost"))
    lost = replace(found.observation, exit_code=80, error="the state of stage 1 is lost")
    own = {**SUMMARY, "outcome": "failed", "exit_code": 80}
    found = judged(replace(SCENARIO, expect=Expect(outcome="state-lost")), (FAULT,), Path("x"), lost)
    found = replace(found, summary=own, is_scenario=True)
    assert found.ended == EndedRecord(outcome="passed", exit_code=0)
    assert (found.to_plain()["outcome"], found.to_plain()["exit_code"]) == ("passed", 0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("120", 120.0), ("120s", 120.0), (" 0.5s ", 0.5), ("2m", 120.0), ("250ms", 0.25), ("1.5", 1.5)],
)
def test_a_grace_in_seconds(text: str, seconds: float) -> None:
    assert grace_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "2d", "0", "0s", "-1", "nan", "inf"])
def test_no_grace(text: str) -> None:
    with pytest.raises(
        UserError, match="--grace: expected a duration such as 250ms, 5s or 2m, or seconds, above 0, found"
    ):
        grace_seconds(text)


def test_kills_are_a_scenario_that_expects_the_weights_of_the_twin() -> None:
    with pytest.raises(UserError, match="audit: expected 1 or more with --kill, found 0"):
        scenario_of(["5:2"], Job(audit=0), with_twin=True)
    blind = scenario_of(["5:2"], Job(audit=0), with_twin=False)
    assert ([each.id for each in blind.faults], blind.expect) == (["5:2"], Expect())
    assert scenario_of(["5:2"], Job(audit=3), with_twin=True).expect == Expect(trajectory="as far as hashed")
    assert scenario_of(["8:2"], Job(), with_twin=True, after=7).faults
    with pytest.raises(UserError, match="--kill 3:1: expected a step above 7"):
        scenario_of(["3:1", "8:2"], Job(), with_twin=True, after=7)
    assert scenario_of([], Job(audit=0), with_twin=True) == Scenario("", "", Job(audit=0), ())


def test_a_check_that_a_signal_left_undecided_is_not_judged() -> None:
    """An interrupted run without a step passed its limits, and a run without faults the check of its faults."""
    expect = Expect(trajectory="identical", steps_lost=0, culprit="exact", samples="exactly-once")
    seen = Observation(130, "", made_history(STRUCK[:4]))
    found = judged(replace(SCENARIO, expect=expect), (FAULT,), Path("x"), seen)
    assert {(each.result, each.text) for each in found.checks} == {("not judged", "the run was interrupted")}
    assert (found.verdict_word, found.exit_code) == ("interrupted", 130)
    struck = judged(replace(SCENARIO, expect=expect), (FAULT,), Path("x"), replace(seen, history=made_history(STRUCK)))
    assert [each.name for each in struck.checks if each.result == "passed"] == ["faults"]
    error = BambooError("the twin was interrupted")
    error.exit_code = ExitCode.INTERRUPTED
    in_twin = judged(SCENARIO, (FAULT,), Path("x"), Observation(0, "", made_history(STRUCK), error))
    assert [(each.name, each.result) for each in in_twin.checks] == [
        ("faults", "passed"),
        ("outcome", "passed"),
        ("trajectory", "not judged"),
    ]
    assert set(get_args(Result)) == RESULT_STYLES.keys()
    plain = judged(SCENARIO, (), Path("x"), Observation(0, "", made_history(STRUCK[:4]), same(9, 8)))
    assert [each.name for each in plain.checks] == ["outcome", "trajectory"]
