"""Faults: the moments at which they strike, as sentences and as JSON."""

from __future__ import annotations

import json

from engine.core.action import Action, Op, parse_action
from engine.core.faults.fault import After, At, Fault, Owner, Role, Worker, from_plain, struck_by, to_plain
from engine.core.job.job import Job
from tests.kills import parse_kill
from tests.looped import looped

JOB = Job(stages=4, pipelines=2, microbatches=8, steps=20)


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


@looped(
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
    assert fault.in_words("stage") == sentence
    assert fault.in_words("block") == sentence.replace("stage", "block")
    assert from_plain(json.loads(json.dumps(to_plain(fault)))) == fault
    assert hash(fault) == hash(from_plain(to_plain(fault)))
