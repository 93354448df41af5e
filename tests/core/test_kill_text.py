"""Kills as the command line spells them: what is left out, and what can never strike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.core.action import Action, Op, parse_action
from engine.core.errors import UserError
from engine.core.faults.fault import At, Fault, Owner, When
from engine.core.faults.scenario_rules import own_actions
from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from tests.kills import parse_kill, parse_kills
from tests.looped import looped

JOB = Job(stages=4, pipelines=2, microbatches=8, steps=20)


def kill(name: str, step: int, action: str, when: When = "before") -> Fault:
    """Returns the fault that kills the owner of the action's own slot."""
    there = parse_action(action)
    return Fault(name, At(step, there, when), (Owner(there.pipeline, there.stage),))


@looped(
    ("text", "expected"),
    [
        ("5:2", kill("5:2", 5, "2B4")),
        ("5:2@1", kill("5:2@1", 5, "2B4@1")),
        ("0:0:F", kill("0:0:F", 0, "0F4")),
        ("19:3:B:7", kill("19:3:B:7", 19, "3B7")),
        ("5:2:B:3@1", kill("5:2:B:3@1", 5, "2B3@1")),
        ("5:2:STEP", kill("5:2:STEP", 5, "2STEP")),
        ("5:2:SEND_B:0:after", kill("5:2:SEND_B:0:after", 5, "2SEND_B0", "after")),
        ("5:2:LOG:during", kill("5:2:LOG:during", 5, "2LOG", "during")),
        ("5:2:after", kill("5:2:after", 5, "2B4", "after")),
        (" 5:2 ", kill("5:2", 5, "2B4")),
    ],
)
def test_forms_of_a_kill(text: str, expected: Fault) -> None:
    assert parse_kill(text, JOB) == expected


@looped(
    ("text", "problem"),
    [
        ("", "expected STEP:STAGE[:ACTION[:MICROBATCH]][:WHEN][@PIPELINE], found '' (such as 5:2 or 5:2:B:3)"),
        ("5", "expected STEP:STAGE[:ACTION[:MICROBATCH]][:WHEN][@PIPELINE], found '5' (such as 5:2 or 5:2:B:3)"),
        ("5:2@", "expected STEP:STAGE[:ACTION[:MICROBATCH]][:WHEN][@PIPELINE], found '5:2@' (such as 5:2 or 5:2:B:3)"),
        ("20:2", "expected a step from 0 to 19, found 20 (the job has 20)"),
        ("-1:2", "expected a step, a whole number, found '-1'"),
        ("9999999999:2", "expected a step, a whole number, found '9999999999'"),  # and no 5000 digits either
        (":2", "expected a step, a whole number, found nothing"),
        ("5:4", "expected a stage from 0 to 3, found 4 (the job has 4)"),
        ("5:2@2", "expected a pipeline from 0 to 1, found 2 (the job has 2)"),
        ("5:2:B:8", "expected a microbatch from 0 to 7, found 8 (the job has 8)"),
        ("5:2:B:", "expected a microbatch, a whole number, found nothing"),
        ("5:2:SENDB", "found '5:2:SENDB' (did you mean 'SEND_B'?)"),
        ("5:2:STEP:3", "expected no microbatch after STEP, which concerns the whole stage, found '5:2:STEP:3'"),
        ("5:2:B:3:late", "found '5:2:B:3:late' (WHEN is one of before, during, after)"),
        ("5:0:RECV_F:1", "found 'RECV_F' (the first stage has no stage before it: no RECV_F)"),
        ("5:3:SEND_F:1", "found 'SEND_F' (the last stage has no stage after it: no SEND_F)"),
        ("5:0:UNSHARD", "found 'UNSHARD' (without fsdp there is no UNSHARD)"),
        ("5:2:STREAM", "found 'STREAM' (log_every is 0, and after the last backward the log is sent)"),
        ("5:2:I", "found 'I' (this schedule has whole backwards: B instead of I and W)"),
        (
            "5:2:f",
            "found 'f' (only a recovery runs a forward again: add a fault that ends a worker in that step)",
        ),
        (
            "5:2:HEAL",
            "found 'HEAL' (a shadow is healed only after a failure: add a fault that ends a worker before step 5)",
        ),
    ],
)
def test_a_mistake_is_explained(text: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_kills([text], JOB)
    (found,) = caught.value.problems
    assert str(found).startswith(("--kill: expected ", f"--kill {text}: expected "))
    assert str(found).count("found") == 1
    assert str(found).endswith(problem)


def test_all_mistakes_of_all_kills_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        parse_kills(["99:9", "5:2:X", "1:1"], JOB)
    assert len(caught.value.problems) == 3


def test_the_same_moment_cannot_be_struck_twice() -> None:
    assert [each.victims for each in parse_kills(["5:2", "5:3", "5:2:B:5"], JOB)] == [
        (Owner(0, 2),),
        (Owner(0, 3),),
        (Owner(0, 2),),
    ]
    with pytest.raises(UserError, match="expected each fault once, found '5:2:B:4'"):
        parse_kills(["5:2", "5:2:B:4"], JOB)


def test_the_middle_of_one_microbatch_is_the_first() -> None:
    assert parse_kill("5:2", replace(JOB, microbatches=1)).moment == At(5, Action(2, Op.B, 0))


def test_what_is_left_out_is_what_the_stage_has_in_the_middle() -> None:
    def struck(text: str, job: Job) -> str:
        (fault,) = parse_kills([text], job)
        assert isinstance(fault.moment, At)
        return str(fault.moment.action)

    halves = Job(stages=4, stages_per_worker=2, schedule="zbv", microbatches=8)
    assert [struck(text, halves) for text in ("3:2", "3:2:I", "3:2:W", "3:2:F")] == ["2I4", "2I4", "2W4", "2F4"]
    both = replace(halves, schedule="dualpipev")
    own = own_actions(*initial_program(both), (0, 0))
    assert {each.op for each in own} >= {Op.B, Op.I}
    middle = next(each for each in own if each.op in (Op.B, Op.I) and each.microbatch == 4)
    assert struck("3:0", both) == str(middle)
    assert parse_action(struck("3:0:B", both)) in own
    assert struck("3:1:STREAM", replace(JOB, log_every=3)) == "1STREAM5"


@pytest.mark.parametrize(
    ("text", "fields", "problem"),
    [
        ("3:2:B", {"stages_per_worker": 2, "schedule": "zbv", "pipelines": 1}, "I and W instead of B)"),
        (
            "3:1:STREAM:2",
            {"log_every": 2},
            "expected a microbatch with STREAM: 1, 3, 5, found 2 "
            "(log_every is 2, and after the last backward the log is sent)",
        ),
        ("3:1:HEAL", {"redundancy": "none"}, "(with redundancy none there are no shadows)"),
    ],
)
def test_what_can_never_strike_depends_on_the_job(text: str, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_kills([text], replace(JOB, **fields))
    (found,) = caught.value.problems
    assert str(found).startswith(f"--kill {text}: ")
    assert str(found).endswith(problem)


def test_after_a_failure_others_run_other_actions() -> None:
    for texts in (
        ["2:1", "3:2:HEAL"],
        ["2:1", "2:2:f"],
        ["2:1", "2:2:I"],
        ["2:1:STEP", "3:2:f"],
        ["2:1:STEP", "3:2:I"],
    ):
        assert len(parse_kills(texts, JOB)) == 2
    for texts in (
        ["4:1", "3:2:f"],
        ["2:1", "3:2:f"],
        ["3:1", "3:2:HEAL"],
        ["2:1", "3:2:STREAM"],
        ["2:1", "3:0:RECV_F"],
    ):
        with pytest.raises(UserError, match=f"--kill {texts[1]}: "):
            parse_kills(texts, JOB)


def test_after_a_failure_backwards_are_whole() -> None:
    halves = Job(stages=4, schedule="zb1p", microbatches=8)
    faults = parse_kills(["5:2", "3:1", "3:2", "6:1:after", "6:2:F"], halves)
    assert [str(fault.moment) for fault in faults] == [
        "before 2B4 of step 5",
        "before 1I4 of step 3",
        "before 2I4 of step 3",
        "after 1B4 of step 6",
        "before 2F4 of step 6",
    ]
    assert [str(each.moment) for each in parse_kills(["3:1:COMMIT", "4:2"], halves)][1] == "before 2I4 of step 4"
    for text in ("5:2:I", "5:2:W:3"):
        with pytest.raises(UserError, match=r"once a worker is lost, backwards are whole: B instead of I and W\)"):
            parse_kills(["3:1", text], halves)
