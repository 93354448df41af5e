"""The redundancy benchmark: whole runs with each redundancy, and with streams, in turns; their steps and their memory.

Time is measured on stages that sleep, because with more workers than cores real compute would fill the very bubbles
that redundant forwards are for. Memory is measured on a real model, and predicted: the process without redundancy,
plus what the memory model says that the tensors of the same program with redundancy take more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from engine.bench.figures.rows import (
    EAGER_GOAL_OVER_FLOOR,
    LAZY_GOAL,
    MEMORY_GOAL,
    Row,
    overhead_rows,
    prediction_row,
)
from engine.bench.runs import run_bamboo, run_python, seconds_between_commits
from engine.core.analysis.memory_model import StageBytes, peak_bytes
from engine.core.config.job import Job
from engine.core.ownership import Grid, Redundancy, one_slot_each, with_shadows
from engine.core.program.build import build_program
from engine.core.program.redundant_forward_pass import overhead_floor

MEMORY_CASE = "memory gpt P=4 M=8"
_GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # fixed: glibc raises it to the size of what it sees freed
_MODES: tuple[Redundancy, ...] = ("none", "lazy", "eager")
_STREAMED = "lazy, log_every 1"
_IN_TIME: dict[str, dict[str, Any]] = {
    **{mode: {"redundancy": mode} for mode in _MODES},
    _STREAMED: {"redundancy": "lazy", "log_every": 1},
}
_SHAPES = ((4, 8), (12, 32))  # P, M
_FORWARD_MS, _BACKWARD_MS = 10, 20
_WIDTH = 256  # of the timed layers and of what enters them, so that nothing need be widened


def overhead_cases() -> dict[str, Job]:
    """Returns the timed cases, name -> job."""
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


def bench_overhead(case: str, job: Job, num_rounds: int, num_steps: int, folder: Path) -> list[Row]:
    """Measures the time of a step of one case with each redundancy, and with streams; every round begins with another.

    Raises:
        WorkerFailedError: a run failed.
    """
    seconds: dict[str, list[float]] = {mode: [] for mode in _IN_TIME}
    for number in range(num_rounds):
        first = number % len(_IN_TIME)
        for mode in [*_IN_TIME][first:] + [*_IN_TIME][:first]:
            run = run_bamboo(folder, *timed_flags(replace(job, **_IN_TIME[mode], steps=num_steps)))
            seconds[mode].append(seconds_between_commits(run))
    floor = overhead_floor(job.stages, job.microbatches, _FORWARD_MS, _BACKWARD_MS)
    return [
        *overhead_rows(f"lazy {case}", seconds["lazy"], seconds["none"], 0.0, LAZY_GOAL),
        *overhead_rows(f"{_STREAMED} {case}", seconds[_STREAMED], seconds["none"], 0.0, None),
        *overhead_rows(f"eager {case}", seconds["eager"], seconds["none"], floor, floor + EAGER_GOAL_OVER_FLOOR),
    ]


def bench_memory(num_rounds: int, folder: Path, quick: bool = False) -> list[Row]:
    """Measures the peak memory of all workers with each redundancy, and predicts it.

    Once as users have it, where the C allocator keeps much of what was freed, in pieces that fit nothing else; and once
    with every freed block from 128 KiB on given back, which leaves the tensors, of which alone the model knows.

    Raises:
        WorkerFailedError: a run failed.
    """
    width, depth = (64, 4) if quick else (512, 8)
    job = Job(model="gpt", model_args={"width": width, "depth": depth}, steps=3)
    sizes = _stage_sizes(job, folder)
    tensors = {mode: _predicted_bytes(job, mode, sizes) for mode in _MODES}
    rows = []
    for allocator, variables in (("", {}), (", freed blocks given back", _GIVING_BACK)):
        rounds = [{mode: _measured_bytes(job, mode, folder, variables) for mode in _MODES} for _ in range(num_rounds)]
        none = median(each["none"] for each in rounds)
        for mode in _MODES[1:]:
            found, predicted = median(each[mode] for each in rounds), none + tensors[mode] - tensors["none"]
            case, metric = f"{mode} {MEMORY_CASE}{allocator}", "peak memory / none, beside the model"
            rows.append(prediction_row(case, metric, found / none, predicted / none, MEMORY_GOAL, num_rounds))
    return rows


def _measured_bytes(job: Job, mode: Redundancy, folder: Path, variables: Mapping[str, str]) -> int:
    run = run_bamboo(folder, *timed_flags(replace(job, redundancy=mode)), **variables)
    return int(sum(json.loads(run.stdout)["peak_memory_mib"].values()) * 2**20)


def timed_flags(job: Job) -> list[str]:
    """Returns the flags of `bamboo run` for a job, with nothing beside the training."""
    flags = ["--audit", "0", "--validate-every", "0"]
    for name in ("model", "stages", "microbatches", "redundancy", "log_every", "steps"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(job, name))]
    for field in ("model_args", "data_args"):
        for name, value in getattr(job, field).items():
            flags += ["--set", f"{field}.{name}={value}"]
    return flags


def _stage_sizes(job: Job, folder: Path) -> list[StageBytes]:
    run = run_python(folder, ["-m", "engine.bench.stage_bytes", json.dumps(asdict(job))])
    return [StageBytes(*each) for each in json.loads(run.stdout)]


def _predicted_bytes(job: Job, mode: Redundancy, sizes: list[StageBytes]) -> int:
    """Returns the sum of what the tensors of every worker take at its peak."""
    fresh = one_slot_each(Grid(job.stages, job.microbatches))
    ownership = with_shadows(fresh, mode, 1, fresh.workers())
    program = build_program(job.schedule, ownership, mode)
    return sum(peak_bytes(actions, worker, ownership, sizes) for worker, actions in program.items())
