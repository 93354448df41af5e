"""The soak of ends: the exit codes that its rules accept, and a few of its runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.end_rules import OTHERS, STEPS, Blow, Moment, holders, plan_of, right_codes, wrongly_out
from tests.e2e.end_soak import soak

ANY = Moment("commit", 3, 0.0)
TRAINING = {"has_begun": True, "is_committed": False, "held_by": [frozenset({"bamboo-0", "bamboo-1"})]}
STARTING = {"has_begun": False, "is_committed": False, "held_by": []}
DRAINING = TRAINING | {"is_committed": True}


def kill(whom: str) -> Blow:
    return Blow(ANY, whom, signal.SIGKILL)


def stop(whom: str, pause_s: float | None = None) -> Blow:
    return Blow(ANY, whom, signal.SIGSTOP, pause_s)


@pytest.mark.parametrize(
    ("blows", "when", "codes"),
    [
        ([], TRAINING, {0}),
        ([kill("bamboo-0")], TRAINING, {0}),
        ([kill("bamboo-0"), stop("bamboo-1")], TRAINING, {0, 80}),
        ([kill("bamboo-0"), stop("bamboo-1", 1.0)], TRAINING, {0}),
        ([kill("bamboo-0"), kill("bamboo-2")], TRAINING, {0}),
        ([kill("bamboo-0"), stop("bamboo-1")], DRAINING, {0}),
        ([kill("bamboo-0")], STARTING, {0, 3}),
        ([kill("bamboo-fork")], TRAINING, {0}),
        ([kill("bamboo-fork")], STARTING, {0}),
        ([kill("etcd")], TRAINING, {0}),
        ([stop("etcd")], TRAINING, {0, 69}),
        ([stop("etcd")], DRAINING, {0, 69}),
        ([stop("etcd", 1.0)], TRAINING, {0}),
        ([kill("etcd"), kill("etcd")], TRAINING, {0, 69}),
    ],
)
def test_which_ends_are_right(blows: list[Blow], when: dict[str, bool], codes: set[int]) -> None:
    assert right_codes(blows, **when) == codes  # type: ignore[arg-type]


def test_holders_are_those_of_the_last_epoch_in_any_pipeline() -> None:
    first = {"event": "epoch", "owners": [0, 1, 2, 3], "shadows": [[1], [0], [3], [2]], "verdict": []}
    last = {"event": "epoch", "owners": [0, 0, 2, 3], "shadows": [[], [], [3], [2]], "verdict": [[1, "is gone"]]}
    held = list(holders([first, last], 2))
    assert held == [{"bamboo-0", "bamboo-2", "bamboo-3"}, {"bamboo-0", "bamboo-2", "bamboo-3"}]
    assert list(holders([], 2)) == []
    assert wrongly_out([first, last], [kill("bamboo-1")]) == []
    assert wrongly_out([first, last], [kill("bamboo-2"), stop("bamboo-1", 1.0)]) == ["worker 1 is gone"]


def test_half_of_the_runs_are_struck_at_their_end_and_everything_is_struck() -> None:
    plans = [plan_of(seed) for seed in range(500)]
    late = [
        plan
        for plan in plans
        if all(blow.moment.kind == "finished" or blow.moment.number >= STEPS - 3 for blow in plan.blows)
    ]
    assert len(late) == 250
    struck = {(blow.whom, blow.number) for plan in plans for blow in plan.blows}
    names = (*OTHERS, *(f"bamboo-{worker}" for worker in range(4)))
    assert struck == {(name, number) for name in names for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM)}


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_few_of_the_runs_end(tmp_path: Path) -> None:
    assert not soak([1008, 1020, 1092, 1117], 2, tmp_path)  # one setting; together they strike every process
