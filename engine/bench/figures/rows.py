"""What a benchmark says: one row per case and metric, ours beside the peer's, and whether the goal is met.

Rules: every measurement of ours has its partner of the peer's, taken next to it, so that what the machine does to one
it does to both; ratios are medians over pairs. Ours is better the smaller it is, in every metric. A row without a
goal has no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

from engine.bench.figures.interval import median_interval

PIPELINE_GOAL_OF_IDEAL = 1.02
SCHEDULE_GOAL_OF_PREDICTION = 1.02
LAUNCH_GOAL = 1 / 3
AUDIT_GOAL = 1.02
LAZY_GOAL = 0.01
EAGER_GOAL_OVER_FLOOR = 0.02
MEMORY_GOAL = 1.05


@dataclass(frozen=True, slots=True)
class Row:
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
        """Returns the row as plain values, figures with six digits."""
        return {
            name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in asdict(self).items()
        }


COLUMNS = tuple(each.name for each in fields(Row))


@dataclass(frozen=True, slots=True)
class Stamps:
    """One iteration of a pipeline on one worker; the sleeps are those of its timed layers, none for real compute.

    A backward may sleep in parts.
    """

    start_ns: int
    end_ns: int
    forwards_ns: tuple[int, ...] = ()
    backwards_ns: tuple[int, ...] = ()


def seconds_taken(workers: Sequence[Stamps]) -> float:
    """Returns the time of one iteration: from the first worker's start to the last worker's end."""
    return (max(each.end_ns for each in workers) - min(each.start_ns for each in workers)) / 1e9


def mean_sleeps(workers: Sequence[Stamps]) -> tuple[float, float]:
    """Returns the seconds that a forward and a backward of a timed layer took on average in one iteration."""
    num_forwards = sum(len(stamps.forwards_ns) for stamps in workers)
    forwards_ns = sum(sum(stamps.forwards_ns) for stamps in workers)
    backwards_ns = sum(sum(stamps.backwards_ns) for stamps in workers)
    return forwards_ns / num_forwards / 1e9, backwards_ns / num_forwards / 1e9


def ideal_seconds(workers: Sequence[Stamps]) -> float:
    """Returns (M + P - 1)(F + B), with F and B as the timed layers of this iteration took on average."""
    num_microbatches = len(workers[0].forwards_ns)
    return (num_microbatches + len(workers) - 1) * sum(mean_sleeps(workers))


def pipeline_rows(case: str, ours: Sequence[Sequence[Stamps]], peer: Sequence[Sequence[Stamps]]) -> list[Row]:
    """Returns the rows of one case from its iterations, each with the stamps of every worker."""
    rows = []
    if ours[0][0].forwards_ns:
        of_ideal, peers_of_ideal = (
            median(seconds_taken(workers) / ideal_seconds(workers) for workers in side) for side in (ours, peer)
        )
        goal = PIPELINE_GOAL_OF_IDEAL
        ratio = of_ideal / peers_of_ideal
        rows.append(Row(case, "time / ideal", of_ideal, peers_of_ideal, ratio, goal, of_ideal <= goal, len(ours)))
    ours_s, peer_s = ([seconds_taken(workers) for workers in side] for side in (ours, peer))
    return rows + _with_interval(case, "iteration s", ours_s, peer_s)


def schedule_rows(
    case: str,
    ours: Sequence[float],
    predicted: Sequence[float],
    of_sleeps: Sequence[float],
    peer_name: str,
    peer: Sequence[float],
    has_goal: bool = True,
) -> list[Row]:
    """Returns the rows of one schedule from the seconds of its iterations, and those that two dry runs give each.

    `has_goal` says whether ours must not be slower than the peer's.
    """
    return [
        paired_row(case, "iteration s, beside its dry run", ours, predicted, SCHEDULE_GOAL_OF_PREDICTION),
        paired_row(case, "iteration s, beside its dry run of sleeps alone", ours, of_sleeps, None),
        *_with_interval(case, f"iteration s, beside {peer_name}", ours, peer, has_goal),
    ]


def _with_interval(
    case: str, metric: str, ours: Sequence[float], peer: Sequence[float], has_goal: bool = True
) -> list[Row]:
    """Returns a row for the median ratio and one for each end of its interval; not slower: the low end is <= 1."""
    interval = median_interval([one / other for one, other in zip(ours, peer, strict=True)])
    goal, met = (1.0, interval.low <= 1.0) if has_goal else (None, None)
    middle = (case, metric, median(ours), median(peer), interval.median, None, None, len(ours))
    low = (case, f"{metric}, low end of 95 %", median(ours), median(peer), interval.low, goal, met)
    high = (case, f"{metric}, high end of 95 %", median(ours), median(peer), interval.high, None, None)
    return [Row(*middle), Row(*low, len(ours)), Row(*high, len(ours))]


def paired_row(case: str, metric: str, ours: Sequence[float], peer: Sequence[float], goal: float | None) -> Row:
    """Returns one row whose goal, if it has one, is for the median ratio of the pairs."""
    ratio = median(one / other for one, other in zip(ours, peer, strict=True))
    return Row(
        case, metric, median(ours), median(peer), ratio, goal, None if goal is None else ratio <= goal, len(ours)
    )


def overhead_rows(
    case: str, ours: Sequence[float], none: Sequence[float], floor: float, goal: float | None
) -> list[Row]:
    """Returns the time of a step beside that without redundancy, and their ratio beside the least that it can be.

    `floor` and `goal`, where there is one, are shares of the time without redundancy.
    """
    share = median(one / other for one, other in zip(ours, none, strict=True))
    least, most = 1 + floor, None if goal is None else 1 + goal
    met = None if most is None else share <= most
    return [
        Row(case, "step s, beside none", median(ours), median(none), share, None, None, len(ours)),
        Row(case, "time / none, beside the floor", share, least, share / least, most, met, len(ours)),
    ]


def prediction_row(case: str, metric: str, found: float, predicted: float, goal: float, n: int) -> Row:
    """Returns a figure beside its prediction; the goal is for their ratio, whichever of them is the larger."""
    ratio = found / predicted
    return Row(case, metric, found, predicted, ratio, goal, max(ratio, 1 / ratio) <= goal, n)
