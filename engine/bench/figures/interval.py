"""Bootstrap intervals: how far a median could lie elsewhere, had the same few measurements come out differently.

Rule: the resamples are drawn from keyed numbers, so that the same measurements always give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from engine.core.random_key import random_key

_NUM_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and the ends of its percentile bootstrap interval (Efron, The Annals of Statistics 7, 1979)."""

    low: float
    median: float
    high: float


def median_interval(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Interval:
    """Returns the median of some measurements, at least one, with its interval."""
    assert values, "a median of nothing"
    medians = sorted(_resampled_median(values, seed, resample) for resample in range(_NUM_RESAMPLES))
    num_outside = round(_NUM_RESAMPLES * (1.0 - confidence) / 2)
    return Interval(medians[num_outside], median(values), medians[-1 - num_outside])


def _resampled_median(values: Sequence[float], seed: int, resample: int) -> float:
    return median(values[random_key(seed, "bootstrap", resample, draw) % len(values)] for draw in range(len(values)))
