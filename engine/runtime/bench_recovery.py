"""The recovery benchmark: SIGKILL at four points of an iteration, the pause in phases, beside torchrun's restart.

Rules: every kill is a run of its own, read off its events by the rules that users' runs are read by. The floor of a
pause is what must be computed again: the victim's backwards of the step, with lazy redundancy its forwards too, in the
times that its own actions took before. To the goal comes the action that the slowest survivor was in when the others
were told. Both sides of the restart do the same training; the peer saves a checkpoint at every step.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from engine.core.action import Op, parse_action
from engine.core.bench_rows import Row, paired_row
from engine.core.errors import WorkerFailedError
from engine.core.job import Job
from engine.core.recovery_times import PHASES, Recovery, recoveries
from engine.runtime.bench_runs import run_bamboo, run_python

POINTS = (0.25, 0.5, 0.75, 1.0)  # of the backwards of one step
_STEP = 6  # in which the victim dies
_PAUSE_GOALS = {"median": (0.5, 30.0), "p99": (0.99, 60.0)}  # name -> part of all, ms beyond 1.1 x floor
_KNOWN_GOAL_MS = 40.0
_RESTART_GOAL = 1 / 35
_WIDTH = 256


@dataclass(frozen=True, slots=True)
class Case:
    """A job in which the worker of one stage dies."""

    name: str
    job: Job
    stage: int


@dataclass(frozen=True, slots=True)
class Taken:
    """One recovery, in milliseconds: `floor_ms` had to be computed again, `running_ms` a survivor was in an action."""

    pause_ms: float
    floor_ms: float
    running_ms: float
    known_ms: float
    phases_ms: Mapping[str, float]


def recovery_cases() -> dict[str, Case]:
    """Returns the cases by name: timed stages, and real compute."""
    job = Job(steps=_STEP + 3, validate_every=0, warmup_steps=0)
    timed: dict[str, Any] = asdict(job) | {
        "model": "timed",
        "model_args": {"layers": 4, "width": _WIDTH},
        "data_args": {"features": _WIDTH},
    }
    cases = [Case("timed P=4 M=8", Job(**timed), 2), Case("gpt P=2 M=8", replace(job, stages=2), 1)]
    return {case.name: case for case in cases}


def bench_pause(case: Case, num_kills: int, points: Sequence[float], folder: Path) -> list[Row]:
    """Measures the pause of a case with lazy and eager redundancy, `num_kills` times at each point.

    Raises:
        WorkerFailedError: a run did not recover.
    """
    cells = [(redundancy, point) for redundancy in ("lazy", "eager") for point in points]
    taken: dict[tuple[str, float], list[Taken]] = {cell: [] for cell in cells}
    for _ in range(num_kills):
        for redundancy, point in cells:
            taken[redundancy, point].append(_kill(case, redundancy, point, folder))
    rows = []
    for redundancy in ("lazy", "eager"):
        name = f"{case.name} {redundancy}"
        for point in points:
            rows += _pause_rows(f"{name}, killed at {point:.0%}", taken[redundancy, point])
        rows += _phase_rows(name, [each for point in points for each in taken[redundancy, point]])
    return rows


def _kill(case: Case, redundancy: str, point: float, folder: Path) -> Taken:
    """Runs a job whose victim dies when it has been back through a part of its microbatches."""
    num_back = round(point * case.job.microbatches)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        file = Path(name) / "job.yaml"
        file.write_text(json.dumps(_fields(case.job) | {"redundancy": redundancy}))
        kill = f"{_STEP}:{case.stage}:B:{num_back - 1}:after"
        events = run_bamboo(folder, str(file), "--kill", kill, "--no-twin").events
    found = _only(recoveries(events))
    times_ms = {op: _usual_ms(events, case.stage, op) for op in (Op.F, Op.B)}
    in_step = [event for event in events if event["event"] == "action" and event["step"] == _STEP]
    num_forward = sum(_is(event["action"], case.stage, Op.F, event["worker"]) for event in in_step)
    floor_ms = num_back * times_ms[Op.B] + (num_forward * times_ms[Op.F] if redundancy == "lazy" else 0.0)
    assert found.pause_ns is not None
    running_ms = (found.points_ns["fence"] - found.points_ns["agree"]) / 1e6
    known_ms = (found.points_ns["agree"] - found.begin_ns) / 1e6
    phases_ms = {phase: taken / 1e6 for phase, taken in found.phases_ns.items()}
    return Taken(found.pause_ns / 1e6, floor_ms, running_ms, known_ms, phases_ms)


def _fields(job: Job) -> dict[str, Any]:
    """Returns what a job file would say, without the folder, which the caller gives."""
    return {name: value for name, value in asdict(job).items() if name not in ("results", "name")}


def _only(found: Sequence[Recovery]) -> Recovery:
    if len(found) != 1 or found[0].resume_ns is None:
        raise WorkerFailedError(f"expected one recovery, found {'; '.join(map(str, found)) or 'none'}")
    return found[0]


def _usual_ms(events: Iterable[Mapping[str, Any]], stage: int, op: Op) -> float:
    """Returns the median time of an action of a stage before the step of the fault."""
    return median(
        (event["end_ns"] - event["start_ns"]) / 1e6
        for event in events
        if event["event"] == "action" and event["step"] < _STEP and _is(event["action"], stage, op, event["worker"])
    )


def _is(text: str, stage: int, op: Op, worker: int) -> bool:
    action = parse_action(text)
    return action.stage == stage == worker and action.op is op


def _pause_rows(case: str, taken: Sequence[Taken]) -> list[Row]:
    rows = []
    for name, (part, more_ms) in _PAUSE_GOALS.items():
        pause_ms = _quantile([each.pause_ms for each in taken], part)
        floor_ms = median(each.floor_ms for each in taken)
        goal_ms = 1.1 * floor_ms + more_ms + median(each.running_ms for each in taken)
        metric = f"pause ms, {name}; peer: redo floor"
        rows.append(
            Row(case, metric, pause_ms, floor_ms, pause_ms / floor_ms, goal_ms, pause_ms <= goal_ms, len(taken))
        )
    return rows


def _phase_rows(case: str, taken: Sequence[Taken]) -> list[Row]:
    """Returns the median of each phase beside the median pause, and when the last survivor was told."""
    pause_ms = median(each.pause_ms for each in taken)
    rows = []
    for phase in PHASES:
        phase_ms = median(each.phases_ms.get(phase, 0.0) for each in taken)
        rows.append(
            Row(
                case,
                f"{phase} ms, median; peer: pause",
                phase_ms,
                pause_ms,
                phase_ms / pause_ms,
                None,
                None,
                len(taken),
            )
        )
    known_ms, goal_ms = _quantile([each.known_ms for each in taken], 0.99), _KNOWN_GOAL_MS
    metric = "SIGKILL to every survivor told ms, p99; peer: limit"
    return [*rows, Row(case, metric, known_ms, goal_ms, known_ms / goal_ms, goal_ms, known_ms <= goal_ms, len(taken))]


def _quantile(figures: Sequence[float], part: float) -> float:
    """Returns the smallest figure that `part` of all do not exceed."""
    return sorted(figures)[math.ceil(part * len(figures)) - 1]


def bench_restart(num_pairs: int, folder: Path) -> list[Row]:
    """Measures what a kill adds to the step it falls into, against torchrun's restart from a checkpoint of every step.

    Raises:
        WorkerFailedError: a run of either side did not recover.
    """
    job = Job(steps=_STEP + 3, validate_every=0)
    ours: list[float] = []
    peer: list[tuple[float, int]] = []
    for pair in range(num_pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            if side == 0:
                flags = ("--steps", str(job.steps), "--validate-every", "0", "--kill", f"{_STEP}:2", "--no-twin")
                extra_ns = _only(recoveries(run_bamboo(folder, *flags).events)).extra_ns
                assert extra_ns is not None
                ours.append(extra_ns / 1e9)
            else:
                peer.append(_restart_torchrun(job, folder))
    case = f"gpt, {job.stages} workers, one killed"
    restarts = median(count for _, count in peer)
    extras = [extra_s for extra_s, _ in peer]
    return [
        paired_row(case, "time beyond a usual step s; peer: torchrun", ours, extras, _RESTART_GOAL),
        Row(case, "attempts to go on; peer: torchrun's restarts", 1.0, restarts, 1.0 / restarts, None, None, len(peer)),
    ]


def _restart_torchrun(job: Job, folder: Path) -> tuple[float, int]:
    """Returns the seconds that the kill added to the step of torchrun's workers, and how often they were restarted."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.stages}", "--max-restarts=9"]
        command += ["-m", "engine.runtime.bench_restart_peer", json.dumps(asdict(job)), str(_STEP), temporary]
        # Without the variable, the restarted workers read what those before them left in the store, and fail.
        run = run_python(folder, command, TMPDIR=temporary, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    ends_ns: dict[int, int] = {}
    for step, at_ns in re.findall(r"step=(\d+) ended_ns=(\d+)", run.stdout):
        ends_ns[int(step)] = max(ends_ns.get(int(step), 0), int(at_ns))
    restarts = max(int(each) for each in re.findall(r"restart=(\d+)", run.stdout))
    assert sorted(ends_ns) == list(range(job.steps)) and restarts >= 1, run.stdout
    usual_ns = median(later - earlier for earlier, later in pairwise(ends_ns[step] for step in range(_STEP)))
    return (ends_ns[_STEP] - ends_ns[_STEP - 1] - usual_ns) / 1e9, restarts
