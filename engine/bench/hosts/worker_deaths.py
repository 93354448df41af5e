"""Deaths of workers in runs on three hosts, beside the same deaths in runs on one of them.

Rules: both kinds of runs take turns, in the same bed. In a run one worker of each host dies, one after the other, at a
random moment of a step. The pause is that of `bamboo bench recovery`: from the kill to the catch-up point.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from engine.bench.figures.host_times import known_s
from engine.bench.figures.rows import BenchRow, at_most, in_turns, limit_row, row
from engine.bench.hosts.bed_run import BedRun, killed
from engine.core.checks.recovery_log import recoveries
from engine.core.config.job import Job
from engine.core.errors import ensure, required
from engine.core.history.run_records import FaultRecord
from engine.harness.bed.bed_etcd import BedEtcd
from engine.harness.bed.host_bed import HostBed

JOB = Job(
    model="timed",
    model_args={"layers": 6, "forward_ms": 4, "backward_ms": 7, "width": 256},
    data_args={"features": 256},
    stages=6,
    microbatches=4,
    steps=100_000,
    warmup_steps=0,
    audit=0,
    validate_every=0,
    checkpoint_every="0",
)
STEP_S = (JOB.microbatches + JOB.stages - 1) * 0.011
VICTIMS = (1, 3, 5)  # one of each host
BETWEEN = 4  # commits, from the start to the first death and from each one to the next
_KNOWN_S, _PAUSE_MS = 0.025, 25.0
_CASE = "3 hosts, 6 workers, one is killed"


@dataclass(frozen=True, slots=True)
class Death:
    """The times of a death: until all workers of all hosts were told, and until the work was redone."""

    known_s: float
    pause_ms: float


def bench_deaths(num_deaths: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of so many deaths, or a few more, on each side; raises WorkerFailedError if a run failed."""
    with HostBed(3) as bed, tempfile.TemporaryDirectory(dir=folder) as own, BedEtcd(bed.hosts, Path(own)) as etcd:
        chosen = random.Random(0)  # noqa: S311 - every benchmark chooses the same moments
        orders = [chosen.sample(VICTIMS, min(num_deaths, 3)) for _ in range(-(-num_deaths // 3))]
        to_do = {side: iter(orders) for side in ("several", "one")}

        def run(side: str) -> list[Death]:
            is_one = side == "one"
            with tempfile.TemporaryDirectory(dir=own) as name:
                hosts, store = (bed.hosts[:1], None) if is_one else (bed.hosts, etcd)
                with BedRun(hosts, store, Path(name), JOB) as begun:
                    return _deaths(begun, next(to_do[side]), chosen)

        taken = in_turns({side: partial(run, side) for side in to_do}, len(orders))
    several, one = ([each for found in taken[side] for each in found] for side in to_do)
    return _rows(several, one)


def _deaths(run: BedRun, victims: Sequence[int], chosen: random.Random) -> list[Death]:
    killed_ns = {}
    for victim in victims:
        pid = run.pid_of(victim)
        run.until_commits(BETWEEN)
        time.sleep(chosen.random() * STEP_S)
        killed_ns[victim] = killed(pid)
    run.until_commits(BETWEEN)
    told = {victim: known_s(run.records(), [victim], at_ns) for victim, at_ns in killed_ns.items()}
    faults = [
        FaultRecord(fault=str(victim), do="kill", step=0, of=victim, slot=None, at_ns=at_ns)
        for victim, at_ns in killed_ns.items()
    ]
    found = recoveries(run.all_records(faults))
    ensure(len(found) == len(victims), f"{len(victims)} deaths are as many recoveries, not {len(found)}")
    return [
        Death(told[victim], required(each.pause_ns, "training went on") / 1e6)
        for victim, each in zip(victims, found, strict=True)
    ]


def _rows(several: Sequence[Death], one: Sequence[Death]) -> list[BenchRow]:
    rows = [
        limit_row(
            _CASE,
            f"SIGKILL to known on all hosts, p{100 * part:g} s",
            [each.known_s for each in several],
            part,
            _KNOWN_S,
        )
        for part in (0.5, 0.99)
    ]
    rows[0] = row(_CASE, rows[0].metric, rows[0].ours, median(each.known_s for each in one), len(several))
    for name, part, goal in (("median", 0.5, _PAUSE_MS), ("9 of 10 within", 0.9, None)):
        ours, peer = (at_most([each.pause_ms for each in side], part) for side in (several, one))
        limit = None if goal is None else peer + goal
        rows.append(row(_CASE, f"pause ms, {name}; peer: one host", ours, peer, len(several), limit))
    return rows
