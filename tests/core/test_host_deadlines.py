"""Deadlines of other hosts follow the round trips to them: slow networks lose no host, fast ones lose it soon."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from engine.core.deadlines import BACK, RENEWAL, SILENT, Deadline, RoundTrips
from engine.core.hosts.ends import HostSight, LeaseTime
from engine.core.protocol.state import Options, begin
from tests.looped import looped

MS = 1_000_000
S = 1_000 * MS


def after(*trips_ms: float, times: int = 20) -> RoundTrips:
    """Returns what is known after these round trips, so many times."""
    trips = RoundTrips()
    for each in (*trips_ms,) * times:
        trips = trips.with_one(round(each * MS))
    return trips


@pytest.mark.parametrize("deadline", [SILENT, BACK, RENEWAL])
def test_a_deadline_is_the_usual_one_then_rises_with_the_worst_up_to_its_limit(deadline: Deadline) -> None:
    assert deadline.after(None) == deadline.usual_ns
    waits = [deadline.after(each * MS) for each in range(0, 5_000, 7)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (deadline.base_ns, deadline.most_ns)
    assert all(now - before <= 7 * MS * deadline.factor for before, now in pairwise(waits))


@looped(
    ("trips", "worst_ms"),
    [
        (RoundTrips(), None),
        (after(0.2, times=19), None),  # too few
        (after(0.2), 0.2),
        (after(0.2, 30.0, 0.2), 30.0),
        (after(-5.0), 0.0),  # of a clock that was set back
        (RoundTrips(after(900.0).last_ns + after(1.0, times=219).last_ns).with_one(MS), 900.0),
        (RoundTrips(after(900.0).last_ns + after(1.0, times=239).last_ns).with_one(MS), 1.0),  # of a minute ago
    ],
)
def test_the_worst_round_trip_of_the_last_minute_counts(trips: RoundTrips, worst_ms: float | None) -> None:
    assert trips.worst_ns == (None if worst_ms is None else worst_ms * MS)
    assert len(trips.last_ns) <= 240


@looped(
    ("worst_ms", "silent_ms", "back_ms"),
    [(None, 2_000, 200), (0.2, 801, 201.2), (20, 900, 320), (200, 1_800, 1_400), (700, 4_300, 3_000), (5e3, 1e4, 3e3)],
)
def test_a_host_is_lost_by_the_deadlines_of_its_network(
    worst_ms: float | None, silent_ms: float, back_ms: float
) -> None:
    worst_ns = None if worst_ms is None else round(worst_ms * MS)
    silent_ns, back_ns = round(silent_ms * MS), round(back_ms * MS)
    sight = HostSight(S, worst_ns=worst_ns)
    assert sight.why_lost(S + silent_ns - 1) == ""
    assert "silent" in sight.why_lost(S + silent_ns)
    gone = sight._replace(ended_ns=S)
    assert gone.why_lost(S + back_ns - 1) == ("it was silent for 2 s" if back_ns > 2 * S and not worst_ns else "")
    assert gone.why_lost(S + back_ns) == "its stream has ended"


@pytest.mark.parametrize(("trip_ms", "lost_ms", "known_ms"), [(200.0, 400, 6_000), (0.2, 0.3, 1_000)])
def test_ten_minutes_of_a_network_lose_no_host_and_one_that_dies_is_known_soon(
    trip_ms: float, lost_ms: float, known_ms: float
) -> None:
    """Words come each quarter of a second after half a round trip and more, some of them lost once."""
    dice, trips, heard_ns = random.Random(7), RoundTrips(), 0  # noqa: S311 - the same seed makes the same network
    for number in range(4 * 600):
        late_ms = dice.choice([0, 0, 0, dice.expovariate(5 / trip_ms)]) + (lost_ms if dice.random() < 0.02 else 0)
        came_ns = max(heard_ns, round((250 * number + trip_ms / 2 + late_ms) * MS))
        sight = HostSight(heard_ns, worst_ns=trips.worst_ns)
        assert sight.why_lost(came_ns) == "", "it was there"
        trips, heard_ns = trips.with_one(round((trip_ms + late_ms) * MS)), came_ns
    assert trips.worst_ns is not None and trip_ms + lost_ms <= trips.worst_ns / MS < 2 * (trip_ms + lost_ms)
    died_ns, sight = 250 * (4 * 600 - 1) * MS, HostSight(heard_ns, worst_ns=trips.worst_ns)
    looks_ms = range(0, 60_000, 50)  # the coordinating host looks each twentieth of a second
    assert next(after for after in looks_ms if sight.why_lost(died_ns + after * MS)) <= known_ms, (
        "it said its last word"
    )


def test_a_record_comes_with_each_change_that_matters_and_not_with_noise() -> None:
    assert not after(0.2, times=19).differs_from(None)
    assert after(0.2).differs_from(None)
    assert not after(0.3).differs_from(round(0.2 * MS))
    assert not after(9.0).differs_from(round(0.2 * MS))
    assert after(50.0).differs_from(round(0.2 * MS))
    assert not after(60.0).differs_from(50 * MS)
    assert after(20.0).differs_from(50 * MS)


@pytest.mark.parametrize("ttl_s", [3, 5, 30])
def test_three_renewals_fit_into_the_time_of_a_lease(ttl_s: int) -> None:
    lease = LeaseTime(ttl_s * S, 0)
    assert 0 <= lease.end_ns - 3 * lease.longest_call_ns < 3


def test_the_deadlines_of_workers_follow_the_network_too() -> None:
    state = begin(Options(stages=2, redundant=True, look_ns=S, silence_ns=5 * S), (0, 1), ((1,), (0,)), 9, 0)
    fast, slow, slower = (state._replace(round_trip_ns=each).patience for each in (0, 200 * MS, 60 * S))
    assert (fast.look_ns, fast.silence_ns) == (S, 5 * S)
    assert (slow.look_ns, slow.silence_ns) == (S + 1200 * MS, 6 * S)
    assert (slower.look_ns, slower.silence_ns) == (S + 2800 * MS, 14_200 * MS)
