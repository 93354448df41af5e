"""Connections that go silent, stall, are late or end, at the first, a middle and the last border: no bit changes.

A run of a silent border has five cases: three for good, after which one end of each is out, and two that heal in time.
Delays and resets put out no worker.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from engine.core.faults.fault import Fault
from engine.core.job.job import Job
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.thread_server import ThreadServer
from tests.e2e.kill_runs import Event, Runs, differences
from tests.kills import parse_kill

pytestmark = pytest.mark.usefixtures("shared_etcd")
DEADLINE_S = 3.0
BUSY_STEPS = 30  # on a busy machine, whose steps take more than 100 ms, as many of them: an edge is dark after twenty
SMALL: dict[str, Any] = {
    **{"model": "mlp", "model_args": {"width": 16, "depth": 6}, "microbatches": 4, "steps": 22},
    "check_pure": False,
}
# by the number of pipelines: the stages of one, and the slots (pipeline and stage) before the three borders
SHAPES = {1: (6, ((0, 0), (0, 2), (0, 4))), 2: (4, ((0, 0), (1, 1), (0, 2)))}


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    return Runs(tmp_path_factory.mktemp("cuts"), server)


def at_border(do: str, job: Job, step: int, slot: tuple[int, int], **given: Any) -> tuple[Fault, set[int]]:
    """Returns a fault of the border behind a slot, and the two workers at it."""
    pipeline, stage = slot
    here = pipeline * job.stages + stage
    at = parse_kill(f"{step}:{stage}:F:1@{pipeline}", job)
    return Fault(f"{do} {step}", at.moment, at.victims, do, {"peer": here + 1, **given}), {here, here + 1}


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


CASES = [(direction, pipelines) for pipelines in SHAPES for direction in ("there", "back", "both")]


def some(*fast: tuple[str, str, int], kinds: tuple[str, ...]) -> list[Any]:
    """Returns all cases of these kinds, of which the suite runs those that are fast."""
    found = [(do, *case) for do in kinds for case in CASES]
    return [each if each in fast else pytest.param(*each, marks=pytest.mark.soak) for each in found]


@pytest.mark.parametrize(
    ("do", "direction", "pipelines"),
    some(
        ("cut-link", "back", 2),
        kinds=("cut-link", "stall-link"),
    ),
)
def test_a_silent_border_costs_one_end_of_it_and_no_bit(runs: Runs, do: str, direction: str, pipelines: int) -> None:
    stages, slots = SHAPES[pipelines]
    job = Job(**SMALL, stages=stages, pipelines=pipelines, validate_every=0)
    given: dict[str, Any] = {"direction": direction}
    for_good = [at_border(do, job, step, slot, **given) for step, slot in zip((7, 12, 17), slots, strict=True)]
    given["for_ns"] = 900_000_000
    healed = [at_border(do, job, step, slot, **given) for step, slot in zip((2, 4), slots, strict=False)]
    ending, events = runs.run(job, [fault for fault, _ in (*healed, *for_good)])
    assert list(differences(ending, runs.twin(job))) == []
    found = verdicts(events)
    assert [worker in ends for (worker, *_), (_, ends) in zip(found, for_good, strict=True)] == [True] * 3, found
    assert [case for case in found if case[1] > case[2]] == []
    assert [event for event in events if event["event"] == "unconfirmed"] == []


@pytest.mark.parametrize(
    ("do", "direction", "pipelines"),
    some(
        *(("delay-link", "both", 1), ("reset-link", "back", 2)),
        kinds=("delay-link", "reset-link"),
    ),
)
def test_a_late_or_a_broken_border_costs_no_worker_and_no_bit(
    runs: Runs, do: str, direction: str, pipelines: int
) -> None:
    costs_no_worker_and_no_bit(runs, do, direction, pipelines)


@pytest.mark.soak
@pytest.mark.parametrize("do", ["delay-link", "reset-link"])
def test_the_same_holds_in_one_process(tmp_path: Path, do: str) -> None:
    with ThreadServer() as threads:
        costs_no_worker_and_no_bit(Runs(tmp_path, threads), do, "both", 2)


def test_a_fault_of_a_link_that_carries_nothing_is_not_confirmed(runs: Runs) -> None:
    job = Job(**SMALL, stages=6, validate_every=0)
    faults = [at_border(do, job, 3, (0, stage))[0] for do, stage in (("stall-link", 0), ("reset-link", 1))]
    far = [replace(each, parameters={"peer": 3}) for each in faults]
    ending, events = runs.run(job, far)
    assert list(differences(ending, runs.twin(job))) == []
    assert {event["fault"] for event in events if event["event"] == "unconfirmed"} == {each.id for each in far}


def costs_no_worker_and_no_bit(runs: Runs, do: str, direction: str, pipelines: int) -> None:
    stages, slots = SHAPES[pipelines]
    job = Job(**SMALL, stages=stages, pipelines=pipelines, validate_every=0)
    given = {"direction": direction} | ({"by_ns": 15_000_000} if do == "delay-link" else {})
    faults = [at_border(do, job, step, slot, **given) for step, slot in zip((3, 7, 12), slots, strict=True)]
    ending, events = runs.run(job, [fault for fault, _ in faults])
    assert list(differences(ending, runs.twin(job))) == []
    epochs = [event for event in events if event["event"] == "epoch" and event["epoch"] > 1]
    assert [event["verdict"] for event in epochs] == [[]] * (3 if do == "reset-link" else 0)
    assert {event["fault"] for event in events if event["event"] == "confirmed"} == {fault.id for fault, _ in faults}
    assert [event for event in events if event["event"] == "unconfirmed"] == []
