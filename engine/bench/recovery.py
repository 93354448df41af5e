"""The recovery benchmarks: the pause after a SIGKILL, its phases and its floor; the pause with blocks.

Rules: every kill has its own run; the code that reads the events of users' runs reads its events. The floor of a pause
is the usual time of the actions that must be recomputed: the victim's backwards of the step, and with lazy redundancy
its forwards, both from the last streamed microbatch on. With eager redundancy the shadow may not have run all of these
forwards before it stopped; a second floor adds them. The goal adds the time in which the slowest survivor finished its
action after the others had been notified.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from engine.bench.figures import BenchRow, Cases, at_most, in_turns, paired_row, redo_of, row
from engine.bench.runs import job_fields, run_bamboo, seconds_between_commits, timed_flags
from engine.core.action import Op, parse_action
from engine.core.checks.recoveries import PHASES, Recovery, recoveries
from engine.core.errors import WorkerFailedError, ensure, required
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ActionRecord, CommitRecord, FinishedRecord
from engine.core.job.job import Job
from engine.files.atomic_write import write_atomically

_POINTS = (0.25, 0.5, 0.75, 1.0)  # of the backwards of one step
STEP = 6  # in which the victim dies
_LOOK_S = 0.01
_PAUSE_GOALS = {"median": (0.5, 30.0), "p99": (0.99, 60.0)}  # name -> part of all, ms beyond 1.1 x floor
_KNOWN_GOAL_MS = 40.0
_WIDTH = 256
_STREAMED, _EAGER = "lazy, log_every 1", "eager"
MODES: dict[str, dict[str, Any]] = {
    "lazy": {"redundancy": "lazy"},
    _STREAMED: {"redundancy": "lazy", "log_every": 1},
    _EAGER: {"redundancy": "eager"},
}
_SHARE_GOAL = 0.20  # of an iteration, for the pause without the phases detect and regroup


@dataclass(frozen=True, slots=True)
class KillCase:
    """A job in which the worker of one stage dies."""

    name: str
    job: Job
    stage: int


@dataclass(frozen=True, slots=True)
class KillFigures:
    """The times of one recovery, in milliseconds."""

    pause_ms: float
    floor_ms: float  # of the actions that must be recomputed
    redone_ms: float  # with the forwards that an eager shadow had not run yet
    known_ms: float  # from the kill until every survivor was told
    running_ms: float  # from then until the last survivor had stopped
    phases_ms: Mapping[str, float]
    iteration_ms: float  # a usual one before the kill
    cpu_ms: Mapping[str, float]  # of all cores of this machine, by phase
    peaks_mib: tuple[float, ...]  # of the survivors


def kill_cases() -> list[KillCase]:
    """Returns a case with timed stages and one with real compute."""
    job = Job(steps=STEP + 3, validate_every=0, warmup_steps=0)
    timed = replace(job, model="timed", model_args={"layers": 4, "width": _WIDTH}, data_args={"features": _WIDTH})
    return [KillCase("timed P=4 M=8", timed, 2), KillCase("gpt P=2 M=8", replace(job, stages=2), 1)]


def pause_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench recovery` that have no peer."""
    sizes = (1, (0.5,)) if quick else (10, _POINTS)
    return {case.name: partial(bench_pause, case, *sizes) for case in kill_cases()}


def bench_pause(case: KillCase, num_kills: int, points: Sequence[float], folder: Path) -> list[BenchRow]:
    """Returns the rows of a case's pause per redundancy, from `num_kills` kills per point; raises WorkerFailedError."""
    cells = [(mode, point) for mode in MODES for point in points]
    results = in_turns({cell: partial(killed, case, MODES[cell[0]], cell[1], folder) for cell in cells}, num_kills)
    rows = []
    for mode in MODES:
        name = f"{case.name} {mode}"
        for point in points:
            rows += _pause_rows(f"{name}, killed at {point:.0%}", results[mode, point], mode)
        rows += _phase_rows(name, [each for point in points for each in results[mode, point]])
    return rows


def killed(case: KillCase, mode: Mapping[str, Any], point: float, folder: Path) -> KillFigures:
    """Returns the times of a run whose victim dies after the backwards of the part `point` of its microbatches."""
    num_back = round(point * case.job.microbatches)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        file = Path(name) / "job.yaml"
        write_atomically(file, json.dumps(job_fields(case.job) | dict(mode)))
        kill = f"{STEP}:{case.stage}:B:{num_back - 1}:after"
        with BusyTime() as busy:
            history = run_bamboo(folder, str(file), "--kill", kill, "--no-twin").history
    recovery = only(recoveries(history.records))
    times_ms = {op: _usual_ms(history, case.stage, op) for op in (Op.F, Op.B)}
    redo = redo_of(history.of(ActionRecord), STEP, case.stage, recovery.points_ns["fence"], mode.get("log_every", 0))
    back_ms = len(redo.backwards) * times_ms[Op.B]
    redone_ms = back_ms + len(redo.left) * times_ms[Op.F]
    floor_ms = back_ms + len(redo.forwards) * times_ms[Op.F] if mode["redundancy"] == "lazy" else back_ms
    pause_ns = required(recovery.pause_ns, "training went on")
    running_ms = (recovery.points_ns["fence"] - recovery.points_ns["agree"]) / 1e6
    known_ms = (recovery.points_ns["agree"] - recovery.begin_ns) / 1e6
    phases_ms = {phase: duration_ns / 1e6 for phase, duration_ns in recovery.phases_ns.items()}
    commits_ns = [each.at_ns for each in history.of(CommitRecord) if each.step < STEP]
    iteration_ms = median(later - earlier for earlier, later in pairwise(commits_ns)) / 1e6
    ends_ns = accumulate((recovery.phases_ns.get(phase, 0) for phase in PHASES), initial=recovery.begin_ns)
    cpu_ms = {phase: busy.ms(*span) for phase, span in zip(PHASES, pairwise(ends_ns), strict=True)}
    peaks_mib = tuple(each.peak_memory_kib / 1024 for each in history.of(FinishedRecord))
    own_ms = floor_ms, redone_ms, known_ms, running_ms, phases_ms, iteration_ms, cpu_ms, peaks_mib
    return KillFigures(pause_ns / 1e6, *own_ms)


class BusyTime:
    """The time in which the cores of this machine were busy while a block runs, by a thread that reads it."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, float]] = []  # monotonic ns, busy ms of all cores
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="busy time", daemon=True)

    def __enter__(self) -> BusyTime:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._samples.append((time.monotonic_ns(), busy_ms(Path("/proc/stat").read_text())))

    def ms(self, begin_ns: int, end_ns: int) -> float:
        """Returns the busy milliseconds of all cores between two times of the block."""
        return _at(self._samples, end_ns) - _at(self._samples, begin_ns)


def busy_ms(stat: str) -> float:
    """Returns the milliseconds in which the cores were busy since the start of the machine, by `/proc/stat`."""
    user, nice, system, _, _, irq, softirq = map(int, stat.split(maxsplit=8)[1:8])
    return (user + nice + system + irq + softirq) * 1000 / os.sysconf("SC_CLK_TCK")


def _at(samples: Sequence[tuple[int, float]], at_ns: int) -> float:
    """Returns the value at a time, on the straight line between the samples beside it."""
    place = bisect(samples, (at_ns, math.inf))
    ensure(0 < place < len(samples), "the samples begin before a recovery, and end after it")
    (before_ns, before), (after_ns, after) = samples[place - 1], samples[place]
    return before + (after - before) * (at_ns - before_ns) / (after_ns - before_ns)


def only(runs: Sequence[Recovery]) -> Recovery:
    """Returns the only recovery of a run; raises WorkerFailedError if it is not the only one, or did not end."""
    if len(runs) != 1 or runs[0].resume_ns is None:
        raise WorkerFailedError(f"expected one recovery, found {'; '.join(map(str, runs)) or 'none'}")
    return runs[0]


def _usual_ms(history: RunHistory, stage: int, op: Op) -> float:
    """Returns the median time of an action of a stage before the step of the fault."""
    return median(
        (action.end_ns - action.start_ns) / 1e6
        for action in history.of(ActionRecord)
        if action.worker == stage and action.step < STEP and parse_action(action.action)[:2] == (stage, op)
    )


def _pause_rows(case: str, kills: Sequence[KillFigures], mode: str) -> list[BenchRow]:
    floors = {"redo floor": median(each.floor_ms for each in kills)}
    if mode == _EAGER:
        floors["what was really redone"] = median(each.redone_ms for each in kills)
    running_ms, rows = median(each.running_ms for each in kills), []
    for floor, floor_ms in floors.items():
        for name, (part, more_ms) in _PAUSE_GOALS.items():
            pause_ms = at_most([each.pause_ms for each in kills], part)
            goal_ms = 1.1 * floor_ms + more_ms + running_ms
            rows.append(row(case, f"pause ms, {name}; peer: {floor}", pause_ms, floor_ms, len(kills), goal_ms))
    rest_ms = [each.pause_ms - each.phases_ms["detect"] - each.phases_ms.get("regroup", 0.0) for each in kills]
    metric = "pause less detect and regroup ms, median; peer: iteration"
    goal = _SHARE_GOAL if mode == _STREAMED else None
    return [*rows, paired_row(case, metric, rest_ms, [each.iteration_ms for each in kills], goal)]


def _phase_rows(case: str, kills: Sequence[KillFigures]) -> list[BenchRow]:
    """Returns the median of each phase beside the median pause, and the time until the last survivor was told."""
    pause_ms = median(each.pause_ms for each in kills)
    rows = []
    for phase in PHASES:
        phase_ms = median(each.phases_ms.get(phase, 0.0) for each in kills)
        rows.append(row(case, f"{phase} ms, median; peer: pause", phase_ms, pause_ms, len(kills)))
    known_ms = at_most([each.known_ms for each in kills], 0.99)
    metric = "SIGKILL to every survivor told ms, p99; peer: limit"
    return [*rows, row(case, metric, known_ms, _KNOWN_GOAL_MS, len(kills), _KNOWN_GOAL_MS)]


# The time of a step and the pause after a SIGKILL with four blocks per worker, beside one.
#
# Rules: the model and the work of each worker are the same on both sides, on stages that sleep. Only the partition
# differs, so the difference is the cost of blocks. The sides take turns. The victim dies after the backward of its
# whole share on the same microbatch.

_BLOCKS_WORKERS, _BLOCKS, _BLOCKS_MICROBATCHES = 4, 4, 8
_BLOCKS_VICTIM = 2
_BLOCKS_STEP_GOAL = 1.02
_BLOCKS_PAUSE_GOAL_MS = 25.0  # beyond the pause with one block
_BLOCKS_PHASES = ("inventory", "plan", "replay")  # whose time depends on the number of slots
_BLOCKS_SHAPE = f"{_BLOCKS_WORKERS} workers, {_BLOCKS} blocks each, M={_BLOCKS_MICROBATCHES}"
_BLOCKS_JOB = Job(
    model="timed",
    model_args={
        "layers": _BLOCKS_WORKERS * _BLOCKS,
        "forward_ms": 10 / _BLOCKS,
        "backward_ms": 20 / _BLOCKS,
        "width": _WIDTH,
    },
    data_args={"features": _WIDTH},
    stages=_BLOCKS_WORKERS,
    microbatches=_BLOCKS_MICROBATCHES,
)


def blocks_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench blocks`."""
    return {
        f"step, {_BLOCKS_SHAPE}": partial(bench_blocks_step, *((1, 4) if quick else (9, 20))),
        f"pause, {_BLOCKS_SHAPE}": partial(bench_blocks_pause, 1 if quick else 9),
    }


def bench_blocks_step(num_rounds: int, num_steps: int, folder: Path) -> list[BenchRow]:
    """Returns the row of step times with blocks, beside one per worker; raises WorkerFailedError."""

    def measured(blocks: int) -> float:
        return seconds_between_commits(
            run_bamboo(folder, *timed_flags(replace(_BLOCKS_JOB, steps=num_steps, blocks=blocks)))
        )

    results = in_turns({blocks: partial(measured, blocks) for blocks in (_BLOCKS, 1)}, num_rounds)
    return [paired_row(_BLOCKS_SHAPE, "step s; peer: one block", results[_BLOCKS], results[1], _BLOCKS_STEP_GOAL)]


def bench_blocks_pause(num_kills: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of pauses after a kill with blocks, beside one per worker; raises WorkerFailedError."""
    results = in_turns({blocks: partial(_phases_ms, blocks, folder) for blocks in (_BLOCKS, 1)}, num_kills)
    rows = []
    for name in ("pause", *_BLOCKS_PHASES):
        ours, peer = (median(each[name] for each in results[blocks]) for blocks in (_BLOCKS, 1))
        goal = peer + _BLOCKS_PAUSE_GOAL_MS if name == "pause" else None
        rows.append(row(_BLOCKS_SHAPE, f"{name} ms, median; peer: one block", ours, peer, num_kills, goal))
    return rows


def _phases_ms(blocks: int, folder: Path) -> dict[str, float]:
    """Returns the milliseconds of the pause after a kill, and of each of its phases."""
    kill = f"{STEP}:{_BLOCKS_VICTIM * blocks}:B:{_BLOCKS_MICROBATCHES // 2 - 1}:after"
    run = run_bamboo(
        folder, *timed_flags(replace(_BLOCKS_JOB, steps=STEP + 3, blocks=blocks)), "--kill", kill, "--no-twin"
    )
    recovery = only(recoveries(run.history.records))
    pause_ns = required(recovery.pause_ns, "training went on")
    return {"pause": pause_ns / 1e6, **{phase: duration_ns / 1e6 for phase, duration_ns in recovery.phases_ns.items()}}
