"""Offsets between clocks as bounds: the truth lies inside, whatever the delays are; and times on one shared clock."""

from __future__ import annotations

import random
from statistics import median

import pytest

from engine.core.history.merging import (
    DRIFT_PPM,
    WINDOW_NS,
    ClockFact,
    OffsetBounds,
    OffsetWatch,
    SharedClock,
    drifted_ns,
)

MS = 1_000_000
S = 1_000 * MS
HOUR = 3600 * S


class Clocks:
    """Two clocks with a drawn offset and a drawn drift; `now_ns` is a third, true one."""

    def __init__(self, seed: int, ppm: float = DRIFT_PPM * 0.99):  # the rest is lost in roundings
        self.random = random.Random(seed)  # noqa: S311
        self.offset_ns = self.random.randint(-24 * HOUR, 24 * HOUR)
        self.drift = self.random.uniform(-ppm, ppm) / 1e6
        self.now_ns = self.random.randint(0, 48 * HOUR)
        self.began_ns = self.now_ns

    @property
    def own_ns(self) -> int:
        return self.now_ns

    @property
    def other_ns(self) -> int:
        return self.now_ns + self.offset_ns + round((self.now_ns - self.began_ns) * self.drift)

    def exchange(self, watch: OffsetWatch, delay_ns: tuple[int, int]) -> None:
        """A message from here, a while, and a message to here."""
        sent_ns = self.own_ns
        self.now_ns += self.random.randint(*delay_ns)
        watch.sent(sent_ns, self.other_ns)
        self.now_ns += self.random.randint(0, 300 * MS)
        sent_ns = self.other_ns
        self.now_ns += self.random.randint(*delay_ns)
        watch.received(sent_ns, self.own_ns)


@pytest.mark.parametrize("delay_ns", [(200_000, 300_000), (20_000, 40 * MS), (0, 0)])
def test_a_hundred_drawn_offsets_lie_inside_their_bounds(delay_ns: tuple[int, int]) -> None:
    widths = []
    for seed in range(100):
        clocks, watch = Clocks(seed), OffsetWatch()
        for _ in range(60):
            clocks.exchange(watch, delay_ns)
            for wait_ns in (0, 250 * MS, clocks.random.randint(0, 5 * S)):
                clocks.now_ns += wait_ns
                bounds = watch.at(clocks.own_ns)
                assert bounds is not None
                assert bounds.least_ns <= clocks.other_ns - clocks.own_ns <= bounds.most_ns
                if wait_ns == 250 * MS:
                    widths.append(bounds.most_ns - bounds.least_ns)
    assert delay_ns != (200_000, 300_000) or median(widths) <= MS


def test_bounds_without_the_growth_by_age_are_wrong() -> None:
    """The control: the same clocks leave bounds that forget the drift."""
    clocks, watch = Clocks(3, ppm=0), OffsetWatch()
    clocks.drift = 190e-6
    clocks.exchange(watch, (0, 1000))
    then = watch.at(clocks.own_ns)
    clocks.now_ns += 60 * S
    now = watch.at(clocks.own_ns)
    assert then is not None and now is not None
    assert now.least_ns <= clocks.other_ns - clocks.own_ns <= now.most_ns
    assert clocks.other_ns - clocks.own_ns > then.most_ns


def test_one_direction_bounds_nothing() -> None:
    watch = OffsetWatch()
    watch.sent(0, 5)
    watch.sent(10, 15)
    assert watch.at(20) is None
    watch.received(20, 21)
    assert watch.at(21) == OffsetBounds(-1, 6)  # 200 ppm of some nanoseconds are rounded up


def test_the_window_slides_and_keeps_the_newest_of_each_direction() -> None:
    watch = OffsetWatch()
    watch.sent(0, 1000)
    watch.received(1000, 2000)
    watch.sent(WINDOW_NS // 2, WINDOW_NS // 2 + 5 * MS)  # a worse one
    near = watch.at(WINDOW_NS // 2)
    assert near is not None and near.most_ns == 1000 + drifted_ns(WINDOW_NS // 2)
    watch.sent(WINDOW_NS + 1, WINDOW_NS + 1 + 7 * MS)  # the first one is out of the window now
    far = watch.at(WINDOW_NS + 1)
    assert far is not None and far.most_ns == 5 * MS + drifted_ns(WINDOW_NS // 2 + 1)
    assert far.least_ns == -1000 - drifted_ns(WINDOW_NS + 1 - 2000)  # old, and the newest of its direction


@pytest.mark.parametrize("jump_ns", [-HOUR, -5 * S, 5 * S, HOUR])
def test_a_clock_that_jumps_is_learned_anew(jump_ns: int) -> None:
    clocks, watch = Clocks(1), OffsetWatch()
    for _ in range(10):
        clocks.exchange(watch, (200_000, 300_000))
    clocks.offset_ns += jump_ns
    for _ in range(2):
        clocks.exchange(watch, (200_000, 300_000))
    bounds = watch.at(clocks.own_ns)
    assert bounds is not None
    assert bounds.least_ns <= clocks.other_ns - clocks.own_ns <= bounds.most_ns
    assert bounds.within_ns < MS


def test_times_of_hosts_stand_on_the_clock_of_the_first_coordinator() -> None:
    # b is 1 h ahead of a, c is 2 h behind b; c was compared with b only, which coordinated later.
    facts = [
        ClockFact("a", "b", 10 * S, OffsetBounds(HOUR - MS, HOUR + MS)),
        ClockFact("b", "c", HOUR + 12 * S, OffsetBounds(-2 * HOUR - 2 * MS, -2 * HOUR)),
    ]
    clock = SharedClock("a", facts)
    assert clock.at("a", 7) == (7, 0)
    at_ns, within_ns = clock.at("b", HOUR + 10 * S)
    assert at_ns == 10 * S
    assert within_ns == MS
    at_ns, within_ns = clock.at("c", -HOUR + 12 * S)  # 2 s after the fact about b
    assert abs(at_ns - 12 * S) <= within_ns
    assert 2 * MS <= within_ns <= 2 * MS + 2 * drifted_ns(3 * S)
    assert not clock.knows("d")
    with pytest.raises(KeyError):
        clock.at("d", 0)


def test_the_way_with_the_least_uncertainty_is_taken() -> None:
    facts = [
        ClockFact("a", "c", 0, OffsetBounds(-50 * MS, 50 * MS)),
        ClockFact("a", "b", 0, OffsetBounds(-MS, MS)),
        ClockFact("c", "b", 0, OffsetBounds(-MS, MS)),
    ]
    assert SharedClock("a", facts).at("c", 0) == (0, 2 * MS)


def test_times_between_two_facts_take_both_and_lie_inside() -> None:
    for seed in range(50):
        clocks, watch, facts = Clocks(seed), OffsetWatch(), []
        truths = []
        for _ in range(30):
            clocks.exchange(watch, (100_000, 2 * MS))
            bounds = watch.at(clocks.own_ns)
            assert bounds is not None
            facts.append(ClockFact("own", "other", clocks.own_ns, bounds))
            clocks.now_ns += clocks.random.randint(0, 20 * S)
            truths.append((clocks.own_ns, clocks.other_ns))
        for reference in ("own", "other"):
            clock = SharedClock(reference, facts)
            for own_ns, other_ns in truths:
                away, here = ("other", "own") if reference == "own" else ("own", "other")
                given_ns, true_ns = (other_ns, own_ns) if away == "other" else (own_ns, other_ns)
                found = clock.at(away, given_ns)
                assert abs(found.at_ns - true_ns) <= found.within_ns
                assert clock.at(here, true_ns) == (true_ns, 0)
