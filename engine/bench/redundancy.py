"""The redundancy benchmark: step time and memory of whole runs with each redundancy, and with streams, in turns.

Time is measured on stages that sleep: with more workers than cores, real compute would fill the bubbles in which
redundant forwards run. Memory is measured on a real model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.bench.figures import BenchRow, Cases, in_turns, overhead_rows, paired_row
from engine.bench.runs import run_bamboo, seconds_between_commits, timed_flags
from engine.core.job.job import Job
from engine.core.ownership import Redundancy
from engine.core.program.passes import overhead_floor

_LAZY_GOAL = 0.01
_EAGER_GOAL_OVER_FLOOR = 0.02
MEMORY_CASE = "memory gpt P=4 M=8"
_GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # bytes; fixed, because glibc else raises it to the freed sizes
_MODES: tuple[Redundancy, ...] = ("none", "lazy", "eager")
_STREAMED = "lazy, log_every 1"
_IN_TIME: dict[str, dict[str, Any]] = {
    **{mode: {"redundancy": mode} for mode in _MODES},
    _STREAMED: {"redundancy": "lazy", "log_every": 1},
}
_SHAPES = ((4, 8), (12, 32))  # P, M
_FORWARD_MS, _BACKWARD_MS = 10, 20
_WIDTH = 256  # of the timed layers and of the data, so that no layer has to widen its input


def overhead_jobs() -> dict[str, Job]:
    """Returns the jobs of the timed cases by their names."""
    return {
        f"timed P={stages} M={microbatches}": Job(
            model="timed",
            model_args={"layers": stages, "forward_ms": _FORWARD_MS, "backward_ms": _BACKWARD_MS, "width": _WIDTH},
            data_args={"features": _WIDTH},
            stages=stages,
            microbatches=microbatches,
        )
        for stages, microbatches in _SHAPES
    }


def redundancy_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench redundancy`."""
    sizes = (1, 4) if quick else (5, 12)
    timed: Cases = {name: partial(bench_overhead, name, job, *sizes) for name, job in overhead_jobs().items()}
    return {**timed, MEMORY_CASE: partial(bench_memory, 1 if quick else 3, quick)}


def bench_overhead(case: str, job: Job, num_rounds: int, num_steps: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of one case's step time with each redundancy, and with streams.

    Raises WorkerFailedError if a run failed.
    """

    def measured(mode: str) -> float:
        run = run_bamboo(folder, *timed_flags(replace(job, **_IN_TIME[mode], steps=num_steps)))
        return seconds_between_commits(run)

    seconds = in_turns({mode: partial(measured, mode) for mode in _IN_TIME}, num_rounds)
    floor = overhead_floor(job.stages, job.microbatches, _FORWARD_MS, _BACKWARD_MS)
    goals = {"lazy": (0.0, _LAZY_GOAL), _STREAMED: (0.0, None), "eager": (floor, floor + _EAGER_GOAL_OVER_FLOOR)}
    rows = []
    for mode, goal in goals.items():
        rows += overhead_rows(f"{mode} {case}", seconds[mode], seconds["none"], *goal)
    return rows


def bench_memory(num_rounds: int, quick: bool, folder: Path) -> list[BenchRow]:
    """Returns the rows of the peak memory, summed over all workers, with each redundancy beside none.

    The first measurement uses the C allocator's defaults, by which the process keeps much freed memory in small pieces.
    The second makes it return every freed block of at least 128 KiB, so that little memory is not of tensors.

    Raises WorkerFailedError if a run failed.
    """
    width, depth = (64, 4) if quick else (512, 8)
    job = Job(model="gpt", model_args={"width": width, "depth": depth}, steps=3)
    rows = []
    for allocator, variables in (("", {}), (", freed blocks given back", _GIVING_BACK)):
        sides = {mode: partial(_measured_mib, job, mode, folder, variables) for mode in _MODES}
        results = in_turns(sides, num_rounds)
        metric = "peak memory of all MiB, beside none"
        rows += [
            paired_row(f"{mode} {MEMORY_CASE}{allocator}", metric, results[mode], results["none"])
            for mode in _MODES[1:]
        ]
    return rows


def _measured_mib(job: Job, mode: Redundancy, folder: Path, variables: Mapping[str, str]) -> float:
    run = run_bamboo(folder, *timed_flags(replace(job, redundancy=mode)), **variables)
    return float(sum(json.loads(run.stdout)["peak_memory_mib"].values()))
