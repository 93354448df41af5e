"""Recoveries of a job of another launcher, and the checks of its expectations, from made-up events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.checks.external_report import (
    CommandEnded,
    EffectSeen,
    ExternalEvent,
    ExternalResult,
    ExternalRun,
    LauncherLine,
    RankBegan,
    RankEnded,
    StrikeMade,
    external_checks,
)
from engine.core.checks.external_verdict import StepReport
from engine.core.faults.external import ExternalExpect, ExternalFault, ExternalMoment, ExternalScenario, ExternalTarget
from engine.core.faults.launchers import LAUNCHERS

MS = 1_000_000
FAULT = ExternalFault("first", ExternalMoment(step=5, rank=1), ExternalTarget(1), "kill")
EXPECT = ExternalExpect(steps_lost=3, culprit="exact", leftovers="none")
SCENARIO = ExternalScenario("mine", "", ("torchrun",), LAUNCHERS["torchrun"], (FAULT,), EXPECT, steps=10)


def steps(pids: dict[int, int], numbers: range, begin_ms: int, each_ms: int = 100) -> list[ExternalEvent]:
    """Returns the reports of some ranks (rank -> pid), a millisecond after each other, from a time on."""
    return [
        StepReport(step, (begin_ms + place * each_ms + rank) * MS, rank, str(pid))
        for place, step in enumerate(numbers)
        for rank, pid in pids.items()
    ]


def restarted(*more: ExternalEvent, first: int = 4) -> ExternalRun:
    """Returns a run whose rank 1 is killed after step 5, at 601 ms; all ranks begin again, with step `first`."""
    events: list[ExternalEvent] = [
        *(RankBegan(0, rank, 10 + rank) for rank in (0, 1)),
        *steps({0: 10, 1: 11}, range(6), 100),
        StrikeMade(602 * MS, "first", (1,), (11,)),
        EffectSeen(603 * MS, "first", "the process has ended"),
        RankEnded(603 * MS, 1, 11),
        LauncherLine(650 * MS, "failed (exitcode: -9)", 1),
        RankEnded(700 * MS, 0, 10),
        *(RankBegan(800 * MS, rank, 20 + rank) for rank in (0, 1)),
        *steps({0: 20, 1: 21}, range(first, 10), 2000),
        *more,
        CommandEnded(3000 * MS, 0),
    ]
    return ExternalRun(events)


def test_a_restart_has_its_phases_its_stall_and_its_lost_steps() -> None:
    (recovery,) = restarted().recoveries()
    assert recovery.phases_ns == {"still": 0, "notice": 48 * MS, "end": 50 * MS, "begin": 100 * MS, "step": 1200 * MS}
    assert recovery.stall is not None and not recovery.stall.bound
    assert recovery.stall.least_ns == (2000 - 601 - 100) * MS  # the gap between reports, less a usual step
    assert (recovery.lost_steps, recovery.blamed, recovery.struck) == (2, (1,), (1,))
    assert str(recovery).startswith("first: training stalled for 1.30 s (ranks stand still after 0 ms, launcher")


def test_strikes_of_a_job_that_goes_on_without_the_rank_are_two_recoveries() -> None:
    events = [
        *steps({0: 10}, range(6), 100),
        *(StrikeMade(602 * MS, "first", (1,), (11,)), RankEnded(603 * MS, 1, 11)),
        *steps({0: 10}, range(6, 10), 900),
        *(StrikeMade(1203 * MS, "second", (2,), (12,)), RankEnded(1204 * MS, 2, 12)),
        *steps({0: 10}, range(10, 14), 1600),
        CommandEnded(3000 * MS, 0),
    ]
    first, second = ExternalRun(events).recoveries()
    assert (first.faults, second.faults) == (("first",), ("second",))
    assert [each.stall and each.stall.least_ns // MS for each in (first, second)] == [200, 300]


def test_a_report_without_a_rank_is_no_return_while_the_rank_stands_still() -> None:
    reports = [StepReport(step, at_ms * MS) for step, at_ms in enumerate([100, 200, 300, 400, 1400, 1500])]
    strike = StrikeMade(390 * MS, "first", (1,), (11,), 900 * MS)
    (recovery,) = ExternalRun([*reports, strike, CommandEnded(3000 * MS, 0)]).recoveries()
    assert recovery.stall is not None and recovery.stall.least_ns == 900 * MS


def test_a_failure_that_is_told_late_counts_and_one_that_is_told_again_does_not() -> None:
    late = LauncherLine(2500 * MS, "worker 0 was ended", 0)
    (recovery,) = restarted(late).recoveries()
    assert recovery.blamed == (0, 1) and "notice" in recovery.phases_ns
    (recovery,) = restarted(replace(late, at_ns=100 * MS), late).recoveries()
    assert recovery.blamed == (1,)


def test_all_expectations_of_a_good_run_pass() -> None:
    run = restarted()
    assert external_checks(SCENARIO, run)[0].text == "first: struck 1.0 ms after step 5, the process has ended"
    assert {each.name: each.result for each in external_checks(SCENARIO, run)} == dict.fromkeys(
        ("faults", "outcome", "steps_lost", "culprit", "leftovers"), "passed"
    )


@pytest.mark.parametrize(
    ("run", "scenario", "name", "text"),
    [
        (restarted(first=1), SCENARIO, "steps_lost", "5 steps lost, 3 at most"),
        (
            restarted(LauncherLine(651 * MS, "", 0)),
            SCENARIO,
            "culprit",
            "first ended rank 1, and the launcher blames ranks 0 and 1",
        ),
        (ExternalRun(restarted().events, ["process 7 (sleep)"]), SCENARIO, "leftovers", "process 7 (sleep)"),
        (restarted(CommandEnded(3000 * MS, 1)), SCENARIO, "outcome", "failed: the command ended with 1, the newest"),
        (restarted(), replace(SCENARIO, steps=11), "outcome", "failed: the command ended with 0, before the 11 steps"),
    ],
)
def test_each_expectation_can_fail(run: ExternalRun, scenario: ExternalScenario, name: str, text: str) -> None:
    if name == "outcome" and run.events[-2].__class__ is CommandEnded:
        run = ExternalRun(run.events[:-1])
    failed = [each for each in external_checks(scenario, run) if each.result == "failed"]
    assert [each.name for each in failed] == [name]
    assert failed[0].text.startswith(text)
    assert ExternalResult(run, external_checks(scenario, run)).exit_code == 1


def test_a_fault_that_did_not_strike_makes_the_case_invalid() -> None:
    run = ExternalRun([*steps({0: 1}, range(4), 0), CommandEnded(900 * MS, 0)])
    (check, *_) = external_checks(replace(SCENARIO, steps=None), run)
    assert check.text == "first (kill rank 1 at step 5 of rank 1): its moment did not come"
    silent = external_checks(SCENARIO, ExternalRun([CommandEnded(900 * MS, 0)]))[0]
    assert silent.text.endswith(
        "no rank has reported a step: call bamboo.progress(step) in it, or give `progress:` a pattern"
    )
    assert ExternalResult(run, (check,)).exit_code == 6


def test_a_rank_that_stands_still_stalls_the_job_without_a_lost_step() -> None:
    """The struck rank ends the next step behind its pause."""
    events = [
        *steps({0: 1, 1: 2}, range(5), 100),
        StrikeMade(510 * MS, "first", (1,), (2,)),
        EffectSeen(511 * MS, "first", "the process stands still"),
        *steps({0: 1, 1: 2}, range(5, 10), 2600),
        CommandEnded(4000 * MS, 0),
    ]
    (recovery,) = ExternalRun(events).recoveries()
    assert recovery.stall is not None and recovery.stall.least_ns == (2600 - 501 - 100) * MS
    assert recovery.lost_steps == 0 and set(recovery.phases_ns) == {"still", "step"}


def test_the_end_of_a_job_is_no_effect_of_a_stop_behind_which_it_has_trained() -> None:
    stop = StrikeMade(510 * MS, "first", (1,), (2,), 2000 * MS)
    before: list[ExternalEvent] = [
        *steps({0: 1, 1: 2}, range(5), 100),
        stop,
        EffectSeen(511 * MS, "first", "the process stands still"),
    ]
    ends: list[ExternalEvent] = [*(RankEnded(3900 * MS, rank, 1 + rank) for rank in (0, 1)), CommandEnded(4000 * MS, 0)]
    trained = ExternalRun([*before, *steps({0: 1, 1: 2}, range(5, 10), 2600), *ends])
    assert [each.ended for each in trained.recoveries()] == [()]
    stuck = ExternalRun([*before, *steps({0: 1}, range(5, 10), 2600), *ends])
    assert [each.ended for each in stuck.recoveries()] == [(1,)]


@pytest.mark.parametrize(
    ("more", "result", "text"),
    [
        (
            steps({0: 20, 1: 21}, range(4, 10), 2000),
            "passed",
            "recovered: the job has ended, its exit code is not known",
        ),
        ([], "failed", "failed: the job has ended, its exit code is not known"),
        (None, "invalid", "the job has ended, and neither its exit code nor a step of it is known"),
    ],
)
def test_a_job_that_was_struck_while_it_ran_and_is_gone(
    more: list[ExternalEvent] | None, result: str, text: str
) -> None:
    before = [] if more is None else steps({0: 10, 1: 11}, range(6), 100)
    struck: list[ExternalEvent] = [
        StrikeMade(602 * MS, "first", (1,), (11,)),
        RankEnded(603 * MS, 1, 11),
        RankBegan(800 * MS, 1, 21),
    ]
    run = ExternalRun([*before, *struck, *(more or ()), CommandEnded(3000 * MS, None, "gone")])
    (check,) = [each for each in external_checks(SCENARIO, run) if each.name == "outcome"]
    assert check.result == result and check.text.startswith(text)


def test_a_strike_during_a_recovery_belongs_to_it_and_one_after_it_is_another() -> None:
    again = StrikeMade(900 * MS, "second", (0,), (20,))
    (recovery,) = restarted(again).recoveries()
    assert (recovery.faults, recovery.struck) == (("first", "second"), (0, 1))
    later = StrikeMade(2350 * MS, "second", (0,), (20,))
    assert [each.faults for each in restarted(later).recoveries()] == [("first",), ("second",)]


def test_a_job_that_does_not_train_on_has_a_stall_with_a_lower_bound_only() -> None:
    events = [each for each in restarted().events if each.at_ns < 2000 * MS]
    run = ExternalRun([*events, CommandEnded(9000 * MS, 1)])
    (recovery,) = run.recoveries()
    assert recovery.stall is not None and recovery.stall.bound and recovery.resume_ns is None
    assert recovery.stall.least_ns == (9000 - 601 - 100) * MS
    assert {each.name: each.result for each in external_checks(SCENARIO, run)}["steps_lost"] == "invalid"


def test_survivors_that_go_on_lose_nothing() -> None:
    """As in torchft: rank 0 trains on, and rank 1 begins again with the step that it is given."""
    events = [
        RankBegan(0, 0, 1),
        RankBegan(0, 1, 2),
        *steps({0: 1, 1: 2}, range(5), 100),
        StrikeMade(510 * MS, "first", (1,), (2,)),
        RankEnded(511 * MS, 1, 2),
        *steps({0: 1}, range(5, 9), 900),
        RankBegan(1000 * MS, 1, 3),
        *steps({0: 1, 1: 3}, range(9, 12), 1300),
        CommandEnded(4000 * MS, 0),
    ]
    (recovery,) = ExternalRun(events).recoveries()
    assert recovery.stall is not None and recovery.stall.least_ns == (900 - 501 - 100) * MS
    assert recovery.lost_steps == 0


def test_survivors_that_begin_again_without_an_end_lose_the_steps_that_they_do_again() -> None:
    """As with NVRx in the process: rank 0 goes back to step 3, and a process that stood by reports as rank 1."""
    events = [
        *steps({0: 1, 1: 2}, range(6), 100),
        StrikeMade(610 * MS, "first", (1,), (2,)),
        RankEnded(611 * MS, 1, 2),
        RankBegan(1301 * MS, 1, 3),  # with its first report
        *steps({0: 1, 1: 3}, range(3, 12), 1300),
        CommandEnded(4000 * MS, 0),
    ]
    (recovery,) = ExternalRun(events).recoveries()
    assert recovery.lost_steps == 3 and recovery.resume_ns == 1300 * MS


def test_an_interrupted_run_decides_nothing() -> None:
    events = [each for each in restarted().events if each.at_ns < 650 * MS]
    run = ExternalRun([*events, CommandEnded(660 * MS, 2, "interrupt")], None)
    checks = external_checks(SCENARIO, run)
    assert {each.result for each in checks} == {"not judged"}
    assert (ExternalResult(run, checks).verdict_word, ExternalResult(run, checks).exit_code) == ("interrupted", 130)
