"""Connections that go silent in real runs, at the first, a middle and the last border: one end goes, no bit changes.

A run has five cases: three cuts for good, after which one end of each is out, and two that heal in half the deadline.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from engine.core.config.job import Job
from engine.core.faults.fault import Fault
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import Event, Runs, differences
from tests.kills import parse_kill

DEADLINE_S = 3.0
BUSY_STEPS = 30  # on a busy machine, whose steps take more than 100 ms, as many of them: an edge is dark after twenty
SMALL: dict[str, Any] = {"model": "mlp", "model_args": {"width": 16, "depth": 6}, "microbatches": 4, "steps": 22}
# by the number of pipelines: the stages of one, and the slots (pipeline and stage) before the three borders
SHAPES = {1: (6, ((0, 0), (0, 2), (0, 4))), 2: (4, ((0, 0), (1, 1), (0, 2)))}


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    return Runs(tmp_path_factory.mktemp("cuts"), server)


def cut(job: Job, step: int, slot: tuple[int, int], direction: str, for_ns: int = 0) -> tuple[Fault, set[int]]:
    """Returns a cut of the border behind a slot, and the two workers at it."""
    pipeline, stage = slot
    here = pipeline * job.stages + stage
    at = parse_kill(f"{step}:{stage}:F:1@{pipeline}", job)
    parameters: dict[str, Any] = {"peer": here + 1, "direction": direction} | ({"for_ns": for_ns} if for_ns else {})
    return Fault(f"cut {step}", at.moment, at.victims, "cut-link", parameters), {here, here + 1}


def verdicts(events: list[Event]) -> list[tuple[int, float, float]]:
    """Returns the workers that were out, each with the seconds from the last fault to its verdict, and the allowed."""
    found, struck_ns, commits_ns = [], 0, [next(each["at_ns"] for each in events if each["event"] == "go")]
    for event in events:
        if event["event"] == "fault":
            struck_ns = event["at_ns"]
        elif event["event"] == "commit":
            commits_ns.append(event["at_ns"])
        elif event["event"] == "epoch" and event["verdict"]:
            usual_s = median(later - earlier for earlier, later in pairwise(commits_ns[-11:])) / 1e9
            allowed_s = max(DEADLINE_S, BUSY_STEPS * usual_s)
            found += [(worker, (event["at_ns"] - struck_ns) / 1e9, allowed_s) for worker, *_ in event["verdict"]]
    return found


@pytest.mark.parametrize(
    ("direction", "pipelines"),
    [
        *(("there", 1), ("back", 2), ("both", 1)),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("there", 2), ("back", 1), ("both", 2))),
    ],
)
def test_a_silent_border_costs_one_end_of_it_and_no_bit(runs: Runs, direction: str, pipelines: int) -> None:
    stages, slots = SHAPES[pipelines]
    job = Job(**SMALL, stages=stages, pipelines=pipelines, validate_every=0)
    for_good = [cut(job, step, slot, direction) for step, slot in zip((7, 12, 17), slots, strict=True)]
    healed = [cut(job, step, slot, direction, 900_000_000) for step, slot in zip((2, 4), slots, strict=False)]
    ending, events = runs.run(job, [fault for fault, _ in (*healed, *for_good)])
    assert list(differences(ending, runs.twin(job))) == []
    found = verdicts(events)
    assert [worker in ends for (worker, *_), (_, ends) in zip(found, for_good, strict=True)] == [True] * 3, found
    assert [case for case in found if case[1] > case[2]] == []
    assert [event for event in events if event["event"] == "unconfirmed"] == []
