"""Bootstrap intervals: around the median, tight where measurements agree, and the same each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.bench.figures.interval import Interval, median_interval
from engine.core.random_key import random_key

VALUES = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=25)


@given(values=VALUES)
def test_low_median_and_high_lie_in_order_within_the_measurements(values: list[float]) -> None:
    interval = median_interval(values)
    assert min(values) <= interval.low <= interval.median <= interval.high <= max(values)


@given(values=VALUES, factor=st.sampled_from([0.25, 2.0, 8.0]))
def test_the_interval_scales_with_the_measurements_and_is_the_same_each_time(
    values: list[float], factor: float
) -> None:
    interval = median_interval(values)
    scaled = Interval(interval.low * factor, interval.median * factor, interval.high * factor)
    assert median_interval([value * factor for value in values]) == scaled


def test_measurements_that_agree_leave_nothing_open() -> None:
    assert median_interval([1.5] * 20) == Interval(1.5, 1.5, 1.5)


def test_less_confidence_needs_less_room() -> None:
    values = [index / 20 for index in range(20)]
    wide, narrow = median_interval(values, 0.99), median_interval(values, 0.5)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_the_true_median_lies_inside_about_as_often_as_promised() -> None:
    # 60 samples of 20 uniform numbers whose median is known; a 95 % interval may miss a few, not many.
    samples = [[random_key(0, "sample", one, each) / 2**63 for each in range(20)] for one in range(60)]
    intervals = [median_interval(sample, 0.95) for sample in samples]
    num_inside = sum(each.low <= 0.5 <= each.high for each in intervals)
    assert 52 <= num_inside <= 60
