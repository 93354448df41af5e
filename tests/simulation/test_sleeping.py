"""Coordinators that stop at every moment, for 0.1 to 60 s: no worker is put out for it, and planted bugs are caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.protocol import failure_detector
from engine.core.protocol import membership as protocol
from engine.core.protocol.state import Phase
from tests.simulation.case import Case, Sleep, from_text
from tests.simulation.planting import all_well, caught
from tests.simulation.sleeping import KINDS, sleep_case

pytestmark = pytest.mark.timeout(300)

Patch = pytest.MonkeyPatch
RANDOM = 60
MOMENTS = 75  # of the small case, about
SMALL = Case(stages=3, microbatches=2, steps=2)
STOPS = (("agent", 60.0), ("all", 0.7), ("all", 1.5), ("all", 60.0), ("alone", 8.0), ("alone", 30.0))


def stopped(kind: str, length_s: float, stride: int = 2) -> Iterator[Case]:
    """Yields the stop of a coordinator at some of its moments."""
    for at in range(1, MOMENTS, stride):
        yield replace(SMALL, sleeps=(Sleep(at, round(length_s * 1e6), kind, is_double=True),))


@pytest.mark.parametrize(("kind", "length_s"), STOPS)
def test_a_coordinator_that_stops_at_any_moment_puts_nobody_out(kind: str, length_s: float) -> None:
    histories = all_well(stopped(kind, length_s))
    assert {history.phase for history in histories} == {Phase.FINISHED}
    assert sum(f"coordinator sleeps: {kind}" in history.turns for history in histories) > 0.8 * len(histories)


def test_coordinators_stop_among_deaths_and_notices() -> None:
    histories = all_well(sleep_case(number) for number in range(RANDOM))
    turns = Counter(turn for history in histories for turn in history.turns)
    assert min(turns[f"coordinator sleeps: {kind}"] for kind in KINDS) > RANDOM / 5, turns
    assert turns["another coordinator takes over"] > RANDOM / 20, turns
    assert {history.phase for history in histories} == {Phase.FINISHED}


def test_cases_of_stops_round_trip() -> None:
    assert all(from_text(sleep_case(number).text()) == sleep_case(number) for number in range(20))


def what_is_told_again_has_the_time_of_then(patch: Patch) -> None:
    real = protocol.step

    def step(state: Any, event: Any) -> Any:
        return real(state._replace(watched_ns=0), event)

    patch.setattr("engine.core.protocol.orders.step", step)


def a_late_look_counts_whole(patch: Patch) -> None:
    patch.setattr(failure_detector, "unwatched_ns", lambda looked_ns, now_ns: 0)


def a_coordinator_that_slept_for_a_second_judges(patch: Patch) -> None:
    """It begins again only after half the time for which a worker may be silent."""

    def unwatched_ns(looked_ns: int, now_ns: int) -> int:
        return now_ns if now_ns - looked_ns > 2_500_000_000 else 0

    patch.setattr(failure_detector, "unwatched_ns", unwatched_ns)


@pytest.mark.parametrize(
    ("bug", "stop", "words"),
    [
        (what_is_told_again_has_the_time_of_then, ("alone", 30.0), "has been silent for 2"),
        (a_late_look_counts_whole, ("agent", 60.0), "has been silent|did not report|clock had to rule"),
        (a_late_look_counts_whole, ("all", 60.0), "has been silent|hangs for|did not send"),
        (a_coordinator_that_slept_for_a_second_judges, ("all", 1.5), "hangs for 1.5 s without running"),
    ],
)
def test_planted(bug: Callable[[Patch], None], stop: tuple[str, float], words: str, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    caught(stopped(*stop, stride=1), words)
