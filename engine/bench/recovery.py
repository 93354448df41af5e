"""The recovery benchmark: the pause after a SIGKILL at four points of an iteration, its phases, and its floor.

Rules: every kill has its own run; the code that reads the events of users' runs reads its events. The floor of a pause
is the usual time of the actions that must be recomputed: the victim's backwards of the step, and with lazy redundancy
its forwards, both from the last streamed microbatch on. With eager redundancy the shadow may not have run all of these
forwards before it stopped; a second floor adds them. The goal adds the time in which the slowest survivor finished its
action after the others had been told.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from engine.bench.figures import BenchRow, Cases, at_most, in_turns, paired_row, redo_of, row
from engine.bench.runs import run_bamboo
from engine.core.action import Op, parse_action
from engine.core.checks.recoveries import PHASES, Recovery, recoveries
from engine.core.errors import WorkerFailedError, required
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ActionRecord, CommitRecord
from engine.core.job.job import Job
from engine.files.atomic_write import write_atomically

_POINTS = (0.25, 0.5, 0.75, 1.0)  # of the backwards of one step
STEP = 6  # in which the victim dies
_PAUSE_GOALS = {"median": (0.5, 30.0), "p99": (0.99, 60.0)}  # name -> part of all, ms beyond 1.1 x floor
_KNOWN_GOAL_MS = 40.0
_WIDTH = 256
_STREAMED, _EAGER = "lazy, log_every 1", "eager"
_MODES: dict[str, dict[str, Any]] = {
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
    """Returns the rows of a case's pause with each kind of redundancy, from `num_kills` kills at each point.

    Raises:
        WorkerFailedError: a run did not recover.
    """
    cells = [(mode, point) for mode in _MODES for point in points]
    taken = in_turns({cell: partial(_kill, case, _MODES[cell[0]], cell[1], folder) for cell in cells}, num_kills)
    rows = []
    for mode in _MODES:
        name = f"{case.name} {mode}"
        for point in points:
            rows += _pause_rows(f"{name}, killed at {point:.0%}", taken[mode, point], mode)
        rows += _phase_rows(name, [each for point in points for each in taken[mode, point]])
    return rows


def _kill(case: KillCase, mode: Mapping[str, Any], point: float, folder: Path) -> KillFigures:
    """Returns the times of a run whose victim dies after the backwards of the part `point` of its microbatches."""
    num_back = round(point * case.job.microbatches)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        file = Path(name) / "job.yaml"
        write_atomically(file, json.dumps(_fields(case.job) | dict(mode)))
        kill = f"{STEP}:{case.stage}:B:{num_back - 1}:after"
        history = run_bamboo(folder, str(file), "--kill", kill, "--no-twin").history
    found = only(recoveries(history.records))
    times_ms = {op: _usual_ms(history, case.stage, op) for op in (Op.F, Op.B)}
    redo = redo_of(history.of(ActionRecord), STEP, case.stage, found.points_ns["fence"], mode.get("log_every", 0))
    back_ms = len(redo.backwards) * times_ms[Op.B]
    redone_ms = back_ms + len(redo.left) * times_ms[Op.F]
    floor_ms = back_ms + len(redo.forwards) * times_ms[Op.F] if mode["redundancy"] == "lazy" else back_ms
    pause_ns = required(found.pause_ns, "training went on")
    running_ms = (found.points_ns["fence"] - found.points_ns["agree"]) / 1e6
    known_ms = (found.points_ns["agree"] - found.begin_ns) / 1e6
    phases_ms = {phase: taken / 1e6 for phase, taken in found.phases_ns.items()}
    commits_ns = [each.at_ns for each in history.of(CommitRecord) if each.step < STEP]
    iteration_ms = median(later - earlier for earlier, later in pairwise(commits_ns)) / 1e6
    return KillFigures(pause_ns / 1e6, floor_ms, redone_ms, known_ms, running_ms, phases_ms, iteration_ms)


def _fields(job: Job) -> dict[str, Any]:
    """Returns the fields of a job file, without the results folder and the name."""
    return {name: value for name, value in asdict(job).items() if name not in ("results", "name")}


def only(found: Sequence[Recovery]) -> Recovery:
    """Returns the only recovery of a run; raises WorkerFailedError if it is not the only one, or did not end."""
    if len(found) != 1 or found[0].resume_ns is None:
        raise WorkerFailedError(f"expected one recovery, found {'; '.join(map(str, found)) or 'none'}")
    return found[0]


def _usual_ms(history: RunHistory, stage: int, op: Op) -> float:
    """Returns the median time of an action of a stage before the step of the fault."""
    return median(
        (each.end_ns - each.start_ns) / 1e6
        for each in history.of(ActionRecord)
        if each.worker == stage and each.step < STEP and parse_action(each.action)[:2] == (stage, op)
    )


def _pause_rows(case: str, taken: Sequence[KillFigures], mode: str) -> list[BenchRow]:
    floors = {"redo floor": median(each.floor_ms for each in taken)}
    if mode == _EAGER:
        floors["what was really redone"] = median(each.redone_ms for each in taken)
    running_ms, rows = median(each.running_ms for each in taken), []
    for floor, floor_ms in floors.items():
        for name, (part, more_ms) in _PAUSE_GOALS.items():
            pause_ms = at_most([each.pause_ms for each in taken], part)
            goal_ms = 1.1 * floor_ms + more_ms + running_ms
            rows.append(row(case, f"pause ms, {name}; peer: {floor}", pause_ms, floor_ms, len(taken), goal_ms))
    rest_ms = [each.pause_ms - each.phases_ms["detect"] - each.phases_ms.get("regroup", 0.0) for each in taken]
    metric = "pause less detect and regroup ms, median; peer: iteration"
    goal = _SHARE_GOAL if mode == _STREAMED else None
    return [*rows, paired_row(case, metric, rest_ms, [each.iteration_ms for each in taken], goal)]


def _phase_rows(case: str, taken: Sequence[KillFigures]) -> list[BenchRow]:
    """Returns the median of each phase beside the median pause, and the time until the last survivor was told."""
    pause_ms = median(each.pause_ms for each in taken)
    rows = []
    for phase in PHASES:
        phase_ms = median(each.phases_ms.get(phase, 0.0) for each in taken)
        rows.append(row(case, f"{phase} ms, median; peer: pause", phase_ms, pause_ms, len(taken)))
    known_ms = at_most([each.known_ms for each in taken], 0.99)
    metric = "SIGKILL to every survivor told ms, p99; peer: limit"
    return [*rows, row(case, metric, known_ms, _KNOWN_GOAL_MS, len(taken), _KNOWN_GOAL_MS)]
