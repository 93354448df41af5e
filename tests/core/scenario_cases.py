"""Small scenarios and kinds of faults, for the tests of everything between a file and a verdict."""

from __future__ import annotations

from typing import Any

from engine.core.action import parse_action
from engine.core.faults.fault import At, FaultKind, Parameter, When
from engine.core.faults.scenario import Expect, FaultSpec, Scenario, Target, Trigger
from engine.core.job.job import Job

KINDS = {
    each.name: each
    for each in (
        FaultKind("kill", "Ends it.", "agent", ends=True),
        FaultKind("stop", "Stops it.", "agent", ends=False, parameters=(Parameter("for", "duration", "how long"),)),
        FaultKind("terminate", "Warns it.", "agent", True, (Parameter("grace", "duration", "time left", 60 * 10**9),)),
        FaultKind("exit", "Exits.", "worker", True, (Parameter("code", "count", "exit code", 0),)),
        FaultKind("slow", "Slows it.", "worker", False, (Parameter("factor", "number", "how slow", required=True),)),
        FaultKind("gil", "Hangs.", "worker", False, (Parameter("gil", "choice", "x", "held", choices=("held", "no")),)),
        FaultKind("say", "Says it.", "worker", False, (Parameter("text", "text", "what"),)),
        FaultKind("gpu-oom", "Fills its GPU.", "worker", ends=True, acts_on="GPU"),
        FaultKind("cut", "Cuts it.", "worker", False, (Parameter("peer", "worker", "the other end", required=True),)),
    )
}
JOB = Job(stages=4, pipelines=2, microbatches=4, steps=12, device="cpu")


def at(step: int, action: str, when: When = "before") -> At:
    """Returns a moment by the text of its action."""
    return At(step, parse_action(action), when)


def wanted(name: str, trigger: Trigger, do: str = "kill", **target: Any) -> FaultSpec:
    """Returns a fault as a scenario asks for it."""
    return FaultSpec(name, trigger, Target(**target), do)


def scenario(*faults: FaultSpec, job: Job = JOB, expect: Expect = Expect()) -> Scenario:  # noqa: B008 - it is frozen
    """Returns a scenario of these faults."""
    return Scenario("made-up", "a test", job, faults, expect)
