"""Shared by benchmarks and their peers: rows with a peer's figure, messages, schedules, redone work, losses."""

from __future__ import annotations

import csv
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from engine.core.action import Action, Op, Program, parse_action
from engine.core.errors import ensure
from engine.core.history.process_records import ClockRecord, KnownRecord
from engine.core.history.run_records import ActionRecord, CommitRecord, Record
from engine.core.job.job import Job
from engine.core.message_kinds import ToAgent, ToWorker, message
from engine.core.ownership import Ownership
from engine.core.program.owners import on_owners
from engine.core.program.passes import with_transfers
from engine.core.program.remaining_tasks import replayed
from engine.core.program.schedules import SCHEDULES, of_kind, with_pairs_together
from engine.files.atomic_write import make_folder, write_atomically

# The rows of a benchmark: one per case and metric, with our figure, the peer's and the verdict on the goal.
#
# Rules: our measurements and the peer's alternate, so load on the machine affects both; ratios are medians over pairs
# of neighbors. In every metric smaller is better. A row without a goal has no verdict.

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
    """One iteration of a pipeline on one worker: times, sleeps of timed layers, and the CPU time of all threads."""

    start_ns: int
    end_ns: int
    forwards_ns: tuple[int, ...] = ()
    backwards_ns: tuple[int, ...] = ()
    cpu_ns: int = 0


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
    """Returns the measurements of each side, taken in rounds with a changing order, none likely to pass `until_s`."""
    results: dict[K, list[T]] = {name: [] for name in sides}
    names, longest_s = [*sides], 0.0
    for number in range(num_rounds):
        start_s = now()
        if number and start_s + longest_s > until_s:
            break
        for name in names:
            results[name].append(sides[name]())
        names, longest_s = [*names[1:], names[0]], max(longest_s, now() - start_s)
    return results


def at_most(figures: Sequence[float], part: float) -> float:
    """Returns the quantile `part` (0 to 1): the smallest figure that this part of the figures does not exceed."""
    return sorted(figures)[math.ceil(part * len(figures)) - 1]


def row(case: str, metric: str, ours: float, peer: float, n: int, goal: float | None = None) -> BenchRow:
    """Returns one row; `goal` is the limit of our figure."""
    return BenchRow(case, metric, ours, peer, ours / peer, goal, None if goal is None else ours <= goal, n)


def ratio_row(case: str, metric: str, ours: float, peer: float, n: int, goal: float | None) -> BenchRow:
    """Returns one row; `goal` is the limit of the ratio of the figures."""
    return BenchRow(case, metric, ours, peer, ours / peer, goal, None if goal is None else ours / peer <= goal, n)


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
    """Returns the rows of a case from both sides' iterations; `remark` on the difference, `goal` for the ratio."""
    rows = []
    if has_ideal:
        of_ideal, peers_of_ideal = (
            median(seconds_taken(workers) / ideal_seconds(workers) for workers in side) for side in (ours, peer)
        )
        rows.append(row(case, "time / ideal", of_ideal, peers_of_ideal, len(ours), PIPELINE_GOAL_OF_IDEAL))
    ours_s, peer_s = ([seconds_taken(workers) for workers in side] for side in (ours, peer))
    middle, low, high = median_interval(_ratios(ours_s, peer_s))
    figures, metric = (median(ours_s), median(peer_s)), f"iteration s{remark}"
    ours_cpu, peer_cpu = ([sum(each.cpu_ns for each in workers) / 1e9 for workers in side] for side in (ours, peer))
    return [
        *rows,
        BenchRow(case, metric, *figures, middle, goal, None if goal is None else middle <= goal, len(ours)),
        BenchRow(case, f"{metric}, low end of 95 %", *figures, low, 1.0, low <= 1.0, len(ours)),
        BenchRow(case, f"{metric}, high end of 95 %", *figures, high, None, None, len(ours)),
        *([paired_row(case, f"CPU of all workers s{remark}", ours_cpu, peer_cpu, 1.0)] if all(peer_cpu) else []),
    ]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, and the ends of its 95 % bootstrap interval (Efron, The Annals of Statistics 7, 1979).

    The seed of the resamples is fixed: the same measurements give the same interval.
    """
    chosen = random.Random(0)  # noqa: S311 - resampling needs no secret
    medians = sorted(median(chosen.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES))
    num_outside = round(_NUM_RESAMPLES * 0.05 / 2)
    return median(values), medians[num_outside], medians[-1 - num_outside]


def interval_rows(case: str, metric: str, ours: Sequence[float], peer: Sequence[float], goal: float) -> list[BenchRow]:
    """Returns the row of the pairs' median ratio, and one per end of its 95 % interval, which the goal bounds."""
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
    """Returns the rows of step times with and without redundancy, and of their ratio beside its `floor`."""
    beside_none = paired_row(case, "step s, beside none", ours, none)
    limit = None if goal is None else 1 + goal
    return [beside_none, row(case, "time / none, beside the floor", beside_none.ratio, 1 + floor, len(ours), limit)]


def _ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, peer, strict=True)]


# Benchmarks on disk: one CSV per measurement, ``<results>/bench/<name>-<time>.csv``, one line per row.
def bench_folder(results: Path) -> Path:
    """Returns the folder of benchmarks; creates it if necessary. Raises StorageError if it cannot."""
    folder = results.absolute() / "bench"
    make_folder(folder, results.absolute(), "try --results")
    return folder


def write_bench(
    folder: Path, name: str, now: datetime, rows: Iterable[Mapping[str, object]], columns: Sequence[str] = COLUMNS
) -> Path:
    """Writes the rows of one benchmark and returns the path; None is an empty value. Raises StorageError."""
    text = StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path = folder / f"{name}-{now:%Y%m%d-%H%M%S}.csv"
    write_atomically(path, text.getvalue())
    return path


# The work that a death leaves to redo, from the events of a run; its time is the floor of the pause.
#
# There is one pipeline, and one slot per worker. The victim's work in the open step is lost, with two exceptions: the
# microbatches whose accumulators it had streamed, and the forwards that an eager shadow had also run before the last
# survivor stopped. The schedule limits the number of these forwards (`passes.py`).


class Redo(NamedTuple):
    """The microbatches of the victim's stage that are redone; in `left`, those whose forward no shadow had run."""

    backwards: frozenset[int]
    forwards: frozenset[int]
    left: frozenset[int]


def redo_of(records: Iterable[ActionRecord], step: int, stage: int, fenced_ns: int, log_every: int = 0) -> Redo:
    """Returns the work of a dead worker's stage to redo in a step; all survivors had stopped by `fenced_ns`."""
    lost: set[Action] = set()
    shadowed: set[Action] = set()
    for record in records:
        if record.step == step and record.end_ns <= fenced_ns:
            action = parse_action(record.action)
            if action.stage == stage:
                (lost if record.worker == stage else shadowed).add(action)
    streamed = sum(action.op is Op.STREAM for action in lost) * log_every
    end = max((action.microbatch + 1 for action in lost), default=0)
    first = [Action(stage, op, microbatch) for op in (Op.B, Op.F) for microbatch in range(streamed, end)]
    again = replayed(first, lost)
    backwards, forwards = ([action for action in again if action.op is op] for op in (Op.B, Op.F))
    left = _microbatches(forwards) - _microbatches(replayed(forwards, shadowed))
    return Redo(_microbatches(backwards), _microbatches(forwards), left)


def _microbatches(actions: Iterable[Action]) -> frozenset[int]:
    return frozenset(action.microbatch for action in actions)


# The times of a loss in a run on several hosts, from the records of all hosts on one clock.
#
# Rules: a host knows of a loss once each of its remaining workers was notified; the hosts have the same clock. A commit
# counts once, when the first host records it. A gap is the time from the last commit before a loss to the first one
# after it, less the usual time of a step.

Hosts = Mapping[str, Sequence[Record]]  # name -> the records of the host


def known_s(hosts: Hosts, lost: Iterable[int], at_ns: int, gone: Iterable[str] = ()) -> float:
    """Returns the time from a loss until all workers of each host know of it, or of the first of several."""
    victims, last_ns = frozenset(lost), 0
    for name, records in hosts.items():
        if name in {*gone}:
            continue
        first_ns: dict[int, int] = {}
        for record in records:
            if isinstance(record, KnownRecord) and record.of in victims and record.at_ns >= at_ns:
                first_ns.setdefault(record.worker, record.at_ns)
        ensure(bool(first_ns), f"no worker of host {name} was told of the loss")
        last_ns = max(last_ns, *first_ns.values())
    return (last_ns - at_ns) / 1e9


def commits_ns(hosts: Hosts) -> list[int]:
    """Returns the times of the commits of a run, each step once, in order."""
    times_ns: dict[int, int] = {}
    for records in hosts.values():
        for record in records:
            if isinstance(record, CommitRecord):
                times_ns[record.step] = min(record.at_ns, times_ns.get(record.step, record.at_ns))
    return [times_ns[step] for step in sorted(times_ns)]


def gap_s(commits: Sequence[int], at_ns: int) -> float:
    """Returns the gap of a loss at `at_ns`, in a run with these commits."""
    before = [commit for commit in commits if commit <= at_ns]
    after = [commit for commit in commits if commit > at_ns]
    ensure(len(before) > 1 and bool(after), "there are commits before a loss and after it")
    return (after[0] - before[-1] - usual_ns(before)) / 1e9


def usual_ns(commits: Sequence[int]) -> float:
    """Returns the median time from one commit to the next."""
    return median(later - earlier for earlier, later in pairwise(commits))


def clock_widths_ms(hosts: Hosts, ahead_ns: Mapping[str, int]) -> tuple[list[float], int]:
    """Returns the widths of all bounds of clocks, and how many miss the offset, known by `ahead_ns`."""
    widths, outside = [], 0
    for name, records in hosts.items():
        for record in records:
            if isinstance(record, ClockRecord):
                offset_ns = ahead_ns[record.of] - ahead_ns[name]
                widths.append((record.most_ns - record.least_ns) / 1e6)
                outside += not record.least_ns <= offset_ns <= record.most_ns
    return widths, outside


# The control messages that only benchmarks have.
LINKS, GLOO, TORCH, SOCKET = "links", "Gloo", "torch's batch_isend_irecv", "a bare socket"  # of the links benchmark


@message
class Turns(ToWorker):
    """The first message to a worker of the pipeline benchmark: how often it measures each side, and where it writes."""

    iterations: int
    temporary: str


@message
class CodecTimes(ToAgent):
    """One iteration of a side at a worker of the pipeline benchmark, told when all are done."""

    side: str
    stamps: Stamps


@message
class Round(ToWorker):
    """The first message to a worker of the relay benchmark: its group, and the worker that ends itself."""

    worker: int
    ranks: tuple[int, ...]
    victim: int


@message
class Hops(ToWorker):
    """The first message to a worker of the links benchmark: how many hops of each size, in bytes, each way takes."""

    worker: int
    hops: int
    sizes: tuple[int, ...]


@message
class HopTimes(ToAgent):
    """The nanoseconds of all hops of a size over one way."""

    way: str
    size: int
    took_ns: tuple[int, ...]


# The schedules that the pipeline benchmark measures, on stages that sleep, and torch's schedule of each.
TORCH_NAMES = {
    "1f1b": "Schedule1F1B",
    "eager-1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-flexible": "ScheduleInterleaved1F1B",
    "interleaved-paired": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb1p": "ScheduleInterleavedZeroBubble",
    "zb2p": "ScheduleInterleavedZeroBubble",
    "v-min": "ScheduleZBVZeroBubble",
    "v-half": "ScheduleZBVZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
    "dualpipev-overlapped": "ScheduleDualPipeV",
}
# The differences between torch's schedules and ours; the others have the same lists of actions.
REMARKS = {
    "eager-1f1b": ", torch's is 1F1B",
    "zb2p": ", torch's is ZB1P",
    "v-min": ", torch's is ZBV, with three times the stash",
    "v-half": ", torch's is ZBV, with twice the stash",
    "dualpipev-overlapped": ", torch's with pairs one after the other",
    "interleaved-paired": ", torch's with pairs one after the other",
}
_WIDTH = 256  # of the timed layers and of the data, so that no layer has to widen its input
_WORKERS, _MICROBATCHES, _MOST_STAGES = 4, 8, 2


def timed_job(schedule: str, num_workers: int, microbatches: int, stages_per_worker: int = 1) -> Job:
    """Returns a job of stages that sleep."""
    stages = num_workers * stages_per_worker
    return Job(
        model="timed",
        model_args={"layers": stages, "width": _WIDTH},
        data_args={"features": _WIDTH},
        stages=stages,
        stages_per_worker=stages_per_worker,
        microbatches=microbatches,
        schedule=schedule,
        redundancy="none",
    )


def schedule_job(schedule: str) -> Job:
    """Returns a job of sleeping stages, two per worker if the schedule takes them, else one."""
    return timed_job(schedule, _WORKERS, _MICROBATCHES, _MOST_STAGES if SCHEDULES[schedule].takes(_MOST_STAGES) else 1)


def timed_program(job: Job, ownership: Ownership) -> Program:
    """Returns the program that is timed: forwards, backwards and transfers of a step of a job with a named schedule."""
    schedule = SCHEDULES[job.schedule]
    lists = schedule(job.stages // job.stages_per_worker, job.microbatches, job.stages_per_worker)
    program = with_transfers(on_owners(lists, ownership), ownership)
    return with_pairs_together(program, of_kind(schedule.overlaps)) if schedule.overlaps else program
