"""Faults as users write them, and the moments at which they strike."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine.core.action import Action, Op, parse_action
from engine.core.errors import UserError
from engine.core.fault import (
    After,
    At,
    Fault,
    Owner,
    Role,
    When,
    Worker,
    from_plain,
    parse_kill,
    parse_kills,
    struck_by,
    to_plain,
)
from engine.core.job import Job

JOB = Job(stages=4, pipelines=2, microbatches=8, steps=20)


def kill(name: str, step: int, action: str, when: When = "before") -> Fault:
    """Returns the fault that kills the owner of the action's own slot."""
    there = parse_action(action)
    return Fault(name, At(step, there, when), (Owner(there.pipeline, there.stage),))


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected STEP:STAGE[:ACTION[:MICROBATCH]][:WHEN][@PIPELINE], found '' (such as 5:2 or 5:2:B:3)"),
        ("5", "expected STEP:STAGE[:ACTION[:MICROBATCH]][:WHEN][@PIPELINE], found '5' (such as 5:2 or 5:2:B:3)"),
        ("5:2@", "expected STEP:STAGE[:ACTION[:MICROBATCH]][:WHEN][@PIPELINE], found '5:2@' (such as 5:2 or 5:2:B:3)"),
        ("20:2", "expected a step from 0 to 19, found '20'"),
        ("-1:2", "expected a step from 0 to 19, found '-1'"),
        (":2", "expected a step from 0 to 19, found nothing"),
        ("5:4", "expected a stage from 0 to 3, found '4'"),
        ("5:2@2", "expected a pipeline from 0 to 1, found '2'"),
        ("5:2:B:8", "expected a microbatch from 0 to 7, found '8'"),
        ("5:2:SENDB", "found '5:2:SENDB' (did you mean 'SEND_B'?)"),
        (
            "5:2:STREAM:3",
            "expected a microbatch after which the job streams, not 3, found '5:2:STREAM:3' (log_every is 0)",
        ),
        ("5:2:STEP:3", "expected no microbatch after STEP, which concerns the whole stage, found '5:2:STEP:3'"),
        ("5:2:B:3:late", "found '5:2:B:3:late' (WHEN is one of before, during, after)"),
        ("5:0:RECV_F:1", "expected an action of stage 0, found '5:0:RECV_F:1' (it has no RECV_F)"),
        ("5:0:UNSHARD", "expected an action of the job, found '5:0:UNSHARD' (it has no UNSHARD without fsdp)"),
        ("5:3:SEND_F:1", "expected an action of stage 3, found '5:3:SEND_F:1' (it has no SEND_F)"),
    ],
)
def test_a_mistake_is_explained(text: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_kill(text, JOB)
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


def test_a_fault_strikes_at_its_moment_and_at_no_other() -> None:
    fault = parse_kill("5:2:B:3@1", JOB)
    action = Action(2, Op.B, 3, 1)
    assert fault.moment == At(5, action)
    assert struck_by([fault], 5, action, "before") is fault
    for other in (Action(1, Op.B, 3, 1), Action(2, Op.F, 3, 1), Action(2, Op.B, 2, 1), Action(2, Op.B, 3)):
        assert struck_by([fault], 5, other, "before") is None
    assert struck_by([fault], 4, action, "before") is None
    assert struck_by([fault], 5, action, "after") is None
    assert struck_by([], 5, action, "before") is None


ACTION = parse_action("2B3@1")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (parse_kill("5:2:B:3@1", JOB), "kill before 2B3@1 of step 5"),
        (Fault("a", At(5, ACTION), (Worker(3),)), "kill worker 3 before 2B3@1 of step 5"),
        (
            Fault("a", At(5, ACTION, "after"), (Owner(0, 2), Owner(1, 3)), "stop", {"for_ns": 100_000_000}),
            "stop the owner of stage 2 and the owner of stage 3 of pipeline 1 after 2B3@1 of step 5 (for 100ms)",
        ),
        (
            Fault("b", After("a", "replay", 250_000_000), (Role("recoverer"),)),
            "kill the recoverer 250ms after the phase replay of the recovery from a",
        ),
        (Fault("b", After("a", "plan"), (Role("shadow"),)), "kill the shadow at the phase plan of the recovery from a"),
        (Fault("b", After("a", None, 5), (Worker(1),)), "kill worker 1 0.005us after the strike of a"),
        (Fault("b", At(1, ACTION), (Worker(1),), "exit", {"code": 0}), "exit worker 1 before 2B3@1 of step 1 (code 0)"),
    ],
)
def test_a_fault_reads_as_a_sentence_and_comes_back_from_json(fault: Fault, sentence: str) -> None:
    assert str(fault) == sentence
    assert from_plain(json.loads(json.dumps(to_plain(fault)))) == fault
    assert hash(fault) == hash(from_plain(to_plain(fault)))
