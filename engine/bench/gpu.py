"""The benchmarks on one GPU: one worker beside plain PyTorch, what safety costs, four workers beside torch's pipeline.

Rules: the sides of a case take turns. A case stops before a round for which its share of the time is too short, so that
all of them end within ten minutes. A ratio whose interval spans its goal is inconclusive. The cases take any job: tests
run them with a tiny one on the CPU.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.bench.figures import BenchRow, Cases, in_turns, interval_rows
from engine.bench.runs import flags, run_bamboo, run_python, seconds_between_commits
from engine.bench.session import bench_pipeline
from engine.core.errors import EnvironmentLacksError, required
from engine.core.job.job import Job
from engine.files.accelerators import accelerators, lacks

_PLAIN_GOAL = 1.03
_LAZY_GOAL, _AUDIT_GOAL, _DETERMINISTIC_GOAL = 1.02, 1.02, 1.05
_ROUNDS, _ITERATIONS = 9, 20
_SHARE_S = 130.0  # of a case; the worker processes of the last one are started once
_Measured = Callable[[Path], Any]
JOB = Job(
    model="gpt-100m",
    data_args={"sequence": 1024},
    dtype="bfloat16",
    lr=3e-4,
    stages=2,
    microbatches=4,
    steps=12,
    redundancy="none",
    audit=0,
    validate_every=0,
    checkpoint_every="0",
    device="cuda",
    backend="direct",
    share_gpu=True,
)


def gpu_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench gpu`; raises EnvironmentLacksError without a GPU that torch can use."""
    if why := lacks(JOB, accelerators()):
        raise EnvironmentLacksError(f"the benchmarks on a GPU need one, and there is {why}")
    return cases_of(JOB, *((1, 3) if quick else (_ROUNDS, _ITERATIONS)))


def cases_of(job: Job, num_rounds: int, num_iterations: int) -> Cases:
    """Returns the cases with a job of two workers without redundancy and audit."""
    alone, four = replace(job, stages=1), replace(job, stages=4, microbatches=8)
    run, lazy, audited = partial(_run, job), replace(job, redundancy="lazy"), replace(job, audit=1)
    free = partial(_run, replace(job, deterministic=False))
    sides: dict[str, tuple[_Measured, _Measured, float]] = {
        "one worker beside plain PyTorch": (partial(_run, alone), partial(_plain, alone), _PLAIN_GOAL),
        "lazy beside none, 2 workers": (partial(_run, lazy), run, _LAZY_GOAL),
        "audit 1 beside 0, 2 workers": (partial(_run, audited), run, _AUDIT_GOAL),
        "deterministic beside not, 2 workers": (run, free, _DETERMINISTIC_GOAL),
    }
    cases: dict[str, _Measured] = {name: partial(_bench_runs, name, num_rounds, *each) for name, each in sides.items()}
    name = "four workers beside torch's pipeline"
    return {**cases, name: partial(bench_pipeline, name, four, num_iterations)}


def _bench_runs(
    case: str, num_rounds: int, ours: _Measured, peer: _Measured, goal: float, folder: Path
) -> list[BenchRow]:
    """Returns the rows of one case, whose sides are whole runs in child processes."""
    sides, until_s = {"ours": partial(ours, folder), "peer": partial(peer, folder)}, time.monotonic() + _SHARE_S
    results = in_turns(sides, num_rounds, until_s)
    return interval_rows(case, "step s", results["ours"], results["peer"], goal)


def _run(job: Job, folder: Path) -> float:
    return seconds_between_commits(run_bamboo(folder, *flags(job)))


def _plain(job: Job, folder: Path) -> float:
    ended = run_python(folder, ["-m", "engine.bench.plain_peer", json.dumps(asdict(job))])
    return float(required(re.search(r"step_s=(\S+)", ended.stdout), "a plain loop tells its time")[1])
