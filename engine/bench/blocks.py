"""The blocks benchmark: the time of a step and the pause after a SIGKILL with four blocks per worker, beside one.

Rules: the model and the work of each worker are the same on both sides, on stages that sleep. Only the cut differs, so
the difference is the cost of blocks. The sides take turns. The victim dies after the backward of its whole share on the
same microbatch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from engine.bench.figures import BenchRow, Cases, in_turns, paired_row, row
from engine.bench.recovery import STEP, only
from engine.bench.redundancy import timed_flags
from engine.bench.runs import run_bamboo, seconds_between_commits
from engine.core.checks.recoveries import recoveries
from engine.core.errors import required
from engine.core.job.job import Job

_WORKERS, _BLOCKS, _MICROBATCHES = 4, 4, 8
_VICTIM = 2
_WIDTH = 256
_STEP_GOAL = 1.02
_PAUSE_GOAL_MS = 25.0  # beyond the pause with one block
_PHASES = ("inventory", "plan", "replay")  # whose time depends on the number of slots
_SHAPE = f"{_WORKERS} workers, {_BLOCKS} blocks each, M={_MICROBATCHES}"
_JOB = Job(
    model="timed",
    model_args={"layers": _WORKERS * _BLOCKS, "forward_ms": 10 / _BLOCKS, "backward_ms": 20 / _BLOCKS, "width": _WIDTH},
    data_args={"features": _WIDTH},
    stages=_WORKERS,
    microbatches=_MICROBATCHES,
)


def blocks_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench blocks`."""
    return {
        f"step, {_SHAPE}": partial(bench_step, *((1, 4) if quick else (9, 20))),
        f"pause, {_SHAPE}": partial(bench_pause, 1 if quick else 9),
    }


def bench_step(num_rounds: int, num_steps: int, folder: Path) -> list[BenchRow]:
    """Returns the row of the time of a step with blocks, beside one block per worker.

    Raises:
        WorkerFailedError: a run failed.
    """

    def measured(blocks: int) -> float:
        return seconds_between_commits(run_bamboo(folder, *_flags(blocks, num_steps)))

    taken = in_turns({blocks: partial(measured, blocks) for blocks in (_BLOCKS, 1)}, num_rounds)
    return [paired_row(_SHAPE, "step s; peer: one block", taken[_BLOCKS], taken[1], _STEP_GOAL)]


def bench_pause(num_kills: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of the pause after a kill, and of some phases, with blocks beside one block per worker.

    Raises:
        WorkerFailedError: a run did not recover.
    """
    taken = in_turns({blocks: partial(_phases_ms, blocks, folder) for blocks in (_BLOCKS, 1)}, num_kills)
    rows = []
    for name in ("pause", *_PHASES):
        ours, peer = (median(each[name] for each in taken[blocks]) for blocks in (_BLOCKS, 1))
        goal = peer + _PAUSE_GOAL_MS if name == "pause" else None
        rows.append(row(_SHAPE, f"{name} ms, median; peer: one block", ours, peer, num_kills, goal))
    return rows


def _phases_ms(blocks: int, folder: Path) -> dict[str, float]:
    """Returns the milliseconds of the pause after a kill, and of each of its phases."""
    kill = f"{STEP}:{_VICTIM * blocks}:B:{_MICROBATCHES // 2 - 1}:after"
    found = only(recoveries(run_bamboo(folder, *_flags(blocks, STEP + 3), "--kill", kill, "--no-twin").history.records))
    pause_ns = required(found.pause_ns, "training went on")
    return {"pause": pause_ns / 1e6, **{phase: taken / 1e6 for phase, taken in found.phases_ns.items()}}


def _flags(blocks: int, steps: int) -> list[str]:
    return [*timed_flags(replace(_JOB, steps=steps)), "--blocks", str(blocks)]
