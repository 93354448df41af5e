"""Runs on three hosts without a fault: the time of a step, beside that on one host; and what is known of the clocks.

Rules: both kinds of runs take turns, in the same bed. A step takes 100 ms, of which its stages sleep nearly all. There
is one worker per host, as all hosts share the cores of this machine. For the clocks each bed has other offsets, which
are drawn; the records of all hosts count.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from engine.bench.figures.host_times import clock_widths_ms, commits_ns, usual_ns
from engine.bench.figures.rows import BenchRow, in_turns, paired_row, row
from engine.bench.hosts.bed_run import BedRun
from engine.bench.hosts.worker_deaths import JOB
from engine.core.errors import ensure
from engine.harness.bed.bed_etcd import BedEtcd
from engine.harness.bed.host_bed import HostBed

_STEP_GOAL, _WIDTH_GOAL_MS = 1.03, 1.0
_WARM, _STEPS = 10, 60
_MOST_APART_S = 100_000  # more than a day
_CLOCK_STEPS = 120
_CASE = "3 hosts, 3 workers, no fault"
_STEP_JOB = replace(
    JOB, stages=3, model_args={"layers": 3, "forward_ms": 6, "backward_ms": 11, "width": 256}, steps=_STEPS
)


def bench_steps(num_pairs: int, folder: Path) -> list[BenchRow]:
    """Returns the row of the time of a step; raises WorkerFailedError if a run failed."""
    with HostBed(3) as bed, tempfile.TemporaryDirectory(dir=folder) as own, BedEtcd(bed.hosts, Path(own)) as etcd:

        def step_ms(*, is_one: bool) -> float:
            hosts, store = (bed.hosts[:1], None) if is_one else (bed.hosts, etcd)
            with tempfile.TemporaryDirectory(dir=own) as name:
                with BedRun(hosts, store, Path(name), _STEP_JOB) as run:
                    codes = run.ended()
                ensure(not any(codes.values()), f"the runs ended with {codes}")
                return usual_ns(commits_ns(run.records())[_WARM:]) / 1e6

        sides = {is_one: partial(step_ms, is_one=is_one) for is_one in (False, True)}
        several, one = in_turns(sides, num_pairs).values()
    return [paired_row(_CASE, "step ms, median; peer: one host", several, one, _STEP_GOAL)]


def bench_clocks(num_beds: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of the bounds of clocks; raises WorkerFailedError if a run failed."""
    drawn = random.Random()  # noqa: S311 - other offsets each time
    widths_ms: list[float] = []
    num_outside = 0
    for _ in range(num_beds):
        apart_s = drawn.randint(1, _MOST_APART_S)
        with HostBed(3, apart_s) as bed, tempfile.TemporaryDirectory(dir=folder) as own:
            ahead_ns = {each.name: number * apart_s * 1_000_000_000 for number, each in enumerate(bed.hosts)}
            with BedEtcd(bed.hosts, Path(own)) as etcd, BedRun(bed.hosts, etcd, Path(own), JOB) as run:
                run.until_commits(_CLOCK_STEPS)
                widths, outside = clock_widths_ms(run.records(), ahead_ns)
        widths_ms += widths
        num_outside += outside
    case, number = f"{2 * num_beds} drawn offsets of clocks", len(widths_ms)
    return [
        row(
            case,
            "width of the bounds ms, median; peer: limit",
            median(widths_ms),
            _WIDTH_GOAL_MS,
            number,
            _WIDTH_GOAL_MS,
        ),
        row(case, "bounds that lack the offset; peer: all", num_outside, number, number, 0.0),
    ]
