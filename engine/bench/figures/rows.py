"""The rows of a benchmark: one per case and metric, with our figure, the peer's and the verdict on the goal.

Rules: our measurements and the peer's alternate, so that load on the machine affects both; ratios are medians over
pairs of neighbours. In every metric the smaller figure is better. A row without a goal has no verdict.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import TypeVar

PIPELINE_GOAL_OF_IDEAL = 1.02
SIDES = ("ours", "peer")  # of the pipeline benchmark
_NUM_RESAMPLES = 1000

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One figure: `ours` and `peer` in the unit that `metric` ends with, their `ratio`, from `n` pairs."""

    case: str
    metric: str
    ours: float
    peer: float
    ratio: float
    goal: float | None
    met: bool | None
    n: int

    def as_dict(self) -> dict[str, str | float | bool | None]:
        """Returns the row as plain values, floats with six significant digits."""
        return {
            name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in asdict(self).items()
        }


COLUMNS = tuple(each.name for each in fields(BenchRow))
Cases = Mapping[str, Callable[[Path], Sequence[BenchRow]]]  # name -> measurement, given a folder for temporary files


@dataclass(frozen=True, slots=True)
class Stamps:
    """One iteration of a pipeline on one worker: its times, and the sleeps of its layers if these are timed ones.

    A backward may sleep in several parts.
    """

    start_ns: int
    end_ns: int
    forwards_ns: tuple[int, ...] = ()
    backwards_ns: tuple[int, ...] = ()


def seconds_taken(workers: Sequence[Stamps]) -> float:
    """Returns the seconds of one iteration, from the first worker's start to the last worker's end."""
    return (max(each.end_ns for each in workers) - min(each.start_ns for each in workers)) / 1e9


def ideal_seconds(workers: Sequence[Stamps]) -> float:
    """Returns (M + P - 1)(F + B) in seconds; F and B are the mean times of the iteration's timed layers."""
    num_forwards = sum(len(each.forwards_ns) for each in workers)
    slept_ns = sum(sum(each.forwards_ns) + sum(each.backwards_ns) for each in workers)
    return (len(workers[0].forwards_ns) + len(workers) - 1) * slept_ns / num_forwards / 1e9


def in_turns(
    sides: Mapping[K, Callable[[], T]],
    num_rounds: int,
    until_s: float = math.inf,
    now: Callable[[], float] = time.monotonic,
) -> dict[K, list[T]]:
    """Returns the measurements of each side; every round measures all sides and begins with another one.

    After the first round, none begins that would end after `until_s` if it took as long as the longest so far.
    """
    taken: dict[K, list[T]] = {name: [] for name in sides}
    names, longest_s = [*sides], 0.0
    for number in range(num_rounds):
        start_s = now()
        if number and start_s + longest_s > until_s:
            break
        for name in names:
            taken[name].append(sides[name]())
        names, longest_s = [*names[1:], names[0]], max(longest_s, now() - start_s)
    return taken


def at_most(figures: Sequence[float], part: float) -> float:
    """Returns the quantile `part` (0 to 1): the smallest figure that this part of the figures does not exceed."""
    return sorted(figures)[math.ceil(part * len(figures)) - 1]


def row(case: str, metric: str, ours: float, peer: float, n: int, goal: float | None = None) -> BenchRow:
    """Returns one row; `goal` is the limit of our figure."""
    return BenchRow(case, metric, ours, peer, ours / peer, goal, None if goal is None else ours <= goal, n)


def ratio_row(case: str, metric: str, ours: float, peer: float, n: int, goal: float) -> BenchRow:
    """Returns one row; `goal` is the limit of the ratio of the figures."""
    return BenchRow(case, metric, ours, peer, ours / peer, goal, ours / peer <= goal, n)


def limit_row(case: str, metric: str, figures: Sequence[float], part: float, limit: float) -> BenchRow:
    """Returns one row that compares the quantile `part` of the figures with its limit."""
    return ratio_row(case, metric, at_most(figures, part), limit, len(figures), 1.0)


def paired_row(
    case: str, metric: str, ours: Sequence[float], peer: Sequence[float], goal: float | None = None
) -> BenchRow:
    """Returns one row; `goal` is the limit of the median ratio of the pairs."""
    ratio = median(_ratios(ours, peer))
    met = None if goal is None else ratio <= goal
    return BenchRow(case, metric, median(ours), median(peer), ratio, goal, met, len(ours))


def pipeline_rows(
    case: str,
    ours: Sequence[Sequence[Stamps]],
    peer: Sequence[Sequence[Stamps]],
    remark: str,
    has_ideal: bool,
    goal: float | None = None,
) -> list[BenchRow]:
    """Returns the rows of one case from the iterations of both sides, each iteration with the stamps of every worker.

    `remark` states the difference between torch's schedule and ours, `goal` is the limit of the ratio of the times.
    """
    rows = []
    if has_ideal:
        of_ideal, peers_of_ideal = (
            median(seconds_taken(workers) / ideal_seconds(workers) for workers in side) for side in (ours, peer)
        )
        rows.append(row(case, "time / ideal", of_ideal, peers_of_ideal, len(ours), PIPELINE_GOAL_OF_IDEAL))
    ours_s, peer_s = ([seconds_taken(workers) for workers in side] for side in (ours, peer))
    middle, low, high = median_interval(_ratios(ours_s, peer_s))
    figures, metric = (median(ours_s), median(peer_s)), f"iteration s{remark}"
    return [
        *rows,
        BenchRow(case, metric, *figures, middle, goal, None if goal is None else middle <= goal, len(ours)),
        BenchRow(case, f"{metric}, low end of 95 %", *figures, low, 1.0, low <= 1.0, len(ours)),
        BenchRow(case, f"{metric}, high end of 95 %", *figures, high, None, None, len(ours)),
    ]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, and the low and high end of its 95 % bootstrap interval.

    It is a percentile interval (Efron, The Annals of Statistics 7, 1979). The seed of the resamples is fixed, so that
    the same measurements always give the same interval.
    """
    chosen = random.Random(0)  # noqa: S311 - resampling needs no secret
    medians = sorted(median(chosen.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES))
    num_outside = round(_NUM_RESAMPLES * 0.05 / 2)
    return median(values), medians[num_outside], medians[-1 - num_outside]


def interval_rows(case: str, metric: str, ours: Sequence[float], peer: Sequence[float], goal: float) -> list[BenchRow]:
    """Returns the row of the median ratio of the pairs, and one for each end of its 95 % interval.

    The goal is met if the whole interval meets it, and missed if none of it does; else the row has no verdict.
    """
    middle, low, high = median_interval(_ratios(ours, peer))
    met = True if high <= goal else False if low > goal else None
    figures, n = (median(ours), median(peer)), len(ours)
    return [
        BenchRow(case, metric, *figures, middle, goal, met if n > 1 else None, n),
        BenchRow(case, f"{metric}, low end of 95 %", *figures, low, None, None, n),
        BenchRow(case, f"{metric}, high end of 95 %", *figures, high, None, None, n),
    ]


def verdict_on(row: BenchRow) -> str:
    """Returns the verdict on the goal of a row in a word; empty without a goal."""
    if row.goal is None:
        return ""
    return "inconclusive" if row.met is None else "yes" if row.met else "no"


def overhead_rows(
    case: str, ours: Sequence[float], none: Sequence[float], floor: float, goal: float | None
) -> list[BenchRow]:
    """Returns the row of step times with and without redundancy, and the row of their ratio beside its ideal minimum.

    `floor` and `goal` are the overheads, as shares of the time without redundancy.
    """
    beside_none = paired_row(case, "step s, beside none", ours, none)
    most = None if goal is None else 1 + goal
    return [
        beside_none,
        row(case, "time / none, beside the floor", beside_none.ratio, 1 + floor, len(ours), most),
    ]


def _ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, peer, strict=True)]
