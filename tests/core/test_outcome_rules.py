"""An expectation that no run can meet is refused before the run; one that a run may meet is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.core.faults.fault import After
from engine.core.faults.scenario import Every, Expect, FaultSpec, Limits
from engine.core.faults.scenario_rules import check_scenario
from engine.core.job.job import Job
from engine.files.jobs.library import library
from engine.files.jobs.matrix_file import read_matrix
from engine.runtime.faults.registry import kinds
from tests.core.scenario_cases import at, scenario, wanted
from tests.looped import looped

KINDS = kinds()
JOB = Job(model="mlp", stages=4, microbatches=4, steps=8)
KILL = wanted("first", at(3, "1B2"))
PAIR = wanted("pair", at(3, "1B2"), count=2, adjacent=True)
NOTHING = wanted("nothing", at(3, "1B2"), "noop")


def told(faults: tuple[FaultSpec, ...], expect: Expect, **job: Any) -> list[str]:
    return [str(each) for each in check_scenario(scenario(*faults, job=replace(JOB, **job), expect=expect), KINDS)]


RECOVERED, LOST = Expect(), Expect("state-lost")


@looped(
    ("faults", "expect", "job", "problem"),
    [
        (
            (KILL,),
            RECOVERED,
            {"redundancy": "none"},
            "expect.outcome: expected state-lost, found 'recovered' (first ends a worker, and with redundancy none no "
            "other worker holds its stages)",
        ),
        ((wanted("a", at(3, "1B2"), "exit"),), RECOVERED, {"redundancy": "none"}, "expected state-lost"),
        ((KILL,), RECOVERED, {"stages": 1, "redundancy": "lazy"}, "(first ends a worker, and the job has one worker)"),
        (
            (KILL,),
            RECOVERED,
            {"redundancy": "none", "pipelines": 2, "fsdp": 1},
            "redundancy none no other worker holds its shards",
        ),
        ((PAIR,), RECOVERED, {}, "(pair ends workers 1 and 2 at once, and no other worker holds stage 2)"),
        ((wanted("all", at(3, "1B2"), count=4),), RECOVERED, {"redundancy_level": 3}, "no other worker holds stage 0"),
        ((wanted("all", at(3, "1B2"), count=8),), RECOVERED, {"pipelines": 2}, "no other worker holds stage 0"),
        ((PAIR, wanted("later", After("pair", "replay"))), RECOVERED, {}, "no other worker holds stage 2"),
        (
            (KILL,),
            LOST,
            {},
            "expect.outcome: expected recovered, found 'state-lost' (one worker is lost, and each stage is held by 2)",
        ),
        ((PAIR,), LOST, {"redundancy_level": 2}, "(2 workers are lost, and each stage is held by 3)"),
        ((NOTHING,), LOST, {}, "(no worker is lost, and each stage is held by 2)"),
        ((NOTHING,), Expect(recovery=Limits(max_ns=1)), {}, "expect.recovery: expected a fault that ends a worker"),
        (
            (KILL,),
            Expect(trajectory="identical"),
            {"deterministic": False},
            "deterministic: expected true with a comparison with a twin, found false (a run without the settings",
        ),
        ((KILL,), Expect(culprit="nobody"), {}, "expect.culprit: expected exact beside a kill, found 'nobody'"),
        (
            (KILL,),
            Expect("noticed"),
            {},
            "expect.notice: expected one of not-finite, replicas-differ with outcome noticed, found nothing",
        ),
        ((KILL,), Expect(notice="not-finite"), {}, "expect.notice: expected outcome noticed with it, found 'recove"),
        (
            (KILL,),
            Expect("resumable"),
            {},
            "expect.outcome: expected a job that keeps checkpoints with it, found 'resumable' (with checkpoint_every "
            "'10m' there is no checkpoint before the end)",
        ),
        ((PAIR,), Expect("resumable"), {"checkpoint_every": "8"}, "no checkpoint before the end"),
        ((PAIR,), Expect("resumable"), {"checkpoint_every": "2"}, "the run restarts by itself 3 times"),
        (
            (PAIR, wanted("n", at(1, "0F0"), "noop"), wanted("o", at(1, "0B0"), "noop")),  # of which nobody ends
            Expect("resumable"),
            {"checkpoint_every": "2"},
            "2 workers are lost at most, and the run restarts by itself 3 times",
        ),
        ((KILL,), Expect("resumable"), {"checkpoint_every": "2", "restarts": 0}, "one worker is lost, and each"),
        ((PAIR,), RECOVERED, {"checkpoint_every": "2", "restarts": 0}, "no other worker holds stage 2"),
    ],
)
def test_what_never_can_be_is_refused(
    faults: tuple[FaultSpec, ...], expect: Expect, job: dict[str, Any], problem: str
) -> None:
    """`bamboo validate` called a scenario with redundancy none that expects a recovery valid."""
    if job.get("stages") == 1:
        faults = (wanted("first", at(3, "0B2")),)
    (found,) = told(faults, expect, **job)
    assert problem in found


@looped(
    ("faults", "expect", "job"),
    [
        ((KILL,), LOST, {"redundancy": "none"}),
        ((PAIR,), LOST, {}),
        ((PAIR,), RECOVERED, {"pipelines": 2}),
        ((PAIR,), RECOVERED, {"redundancy_level": 2}),
        ((KILL,), RECOVERED, {"redundancy": "none", "pipelines": 2}),  # the other pipeline takes over
        ((wanted("a", at(3, "1B2"), "terminate"),), RECOVERED, {"redundancy": "none"}),  # it may hand its stage over
        ((wanted("a", at(7, "1STEP", "after")),), RECOVERED, {"redundancy": "none"}),  # after the last commit
        ((wanted("a", Every(9, 1)),), RECOVERED, {"redundancy": "none"}),  # it may come after the last commit
        ((wanted("a", at(3, "1B2"), "nan"),), RECOVERED, {"redundancy": "none"}),
        ((KILL, wanted("b", at(3, "2B2"))), LOST, {}),
        ((KILL, wanted("b", at(3, "1F2"), count=2, adjacent=True)), RECOVERED, {"pipelines": 2}),
        ((wanted("a", at(2, "0F0")), PAIR), RECOVERED, {"stages": 4}),  # the stages have moved by then
        ((wanted("a", at(3, "1B2"), "stop"),), LOST, {}),  # how many it loses depends on the clock
        ((wanted("a", at(3, "1B2"), "slow"),), Expect(recovery=Limits(max_ns=1)), {}),
        ((KILL,), Expect("noticed", notice="not-finite"), {}),
        ((PAIR,), Expect("resumable"), {"checkpoint_every": "2", "restarts": 0}),
        ((PAIR,), Expect("resumable"), {"checkpoint_every": "1m", "restarts": 0}),
        ((PAIR,), RECOVERED, {"checkpoint_every": "2"}),  # the run goes on from a checkpoint
        ((PAIR,), LOST, {"checkpoint_every": "2"}),  # no checkpoint may be whole yet
    ],
)
def test_what_may_be_is_not(faults: tuple[FaultSpec, ...], expect: Expect, job: dict[str, Any]) -> None:
    assert told(faults, expect, **job) == []


def test_no_shipped_cell_is_refused() -> None:
    """Each of them has passed; the scenarios are read by the tests of `bamboo validate`."""
    assert len(read_matrix(str(library() / "matrix-full.yaml"), kinds()).cells) > 100
