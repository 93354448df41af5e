"""The notice benchmark: the work and the pause that a notice of some length saves, beside the same leave as a kill.

Rules: the stages sleep, and a usual step stands for one of 30 s, so graces of 0 to 120 s take four steps at most. Every
grace has its own run, and strikes behind the same backward; a grace of 0 is the kill. A pause is the time in which the
workers agree on an epoch; a prepared epoch has none. The least useful notice is the shortest one that was tried and
after which no backward ran twice.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.bench.figures import BenchRow, Cases, row
from engine.bench.runs import run_scenario
from engine.core.action import COMPUTE_OPS, FORWARD_OPS, parse_action
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ActionRecord, EpochRecord, GoRecord
from engine.core.program.remaining_tasks import work_of
from engine.files.atomic_write import write_atomically

CASE = "timed P=3 M=8, a step as 30 s"
_STANDS_FOR_S = 30.0
_FORWARD_MS, _BACKWARD_MS = 30, 60
_STAGES, _MICROBATCHES = 3, 8
_STEP_S = (_MICROBATCHES + _STAGES - 1) * (_FORWARD_MS + _BACKWARD_MS) / 1e3
_GRACES_S = (3.75, 7.5, 15.0, 30.0, 60.0, 120.0)
_HALF_S = _STANDS_FOR_S / 2
_STEPS = 4
_AT = {"step": 2, "stage": 1, "action": "B", "microbatch": 2, "when": "after"}


@dataclass(frozen=True, slots=True)
class LeaveCost:
    """The cost of one leave: the backwards and forwards that ran twice, and the pause in milliseconds."""

    backwards: int
    forwards: int
    pause_ms: float


def notice_cases(quick: bool) -> Cases:
    """Returns the only case of `bamboo bench notice`."""
    return {CASE: partial(bench_notice, (_HALF_S,) if quick else _GRACES_S)}


def bench_notice(graces_s: tuple[float, ...], folder: Path) -> list[BenchRow]:
    """Returns the rows of each grace, and those of the least useful notice.

    Raises:
        WorkerFailedError: a run failed.
    """
    kill = _cost(_run({"do": "kill"}, folder))
    rows, useful = [], []
    for grace_s in graces_s:
        grace_ms = round(grace_s / _STANDS_FOR_S * _STEP_S * 1e3)
        cost = _cost(_run({"do": "terminate", "grace": f"{grace_ms}ms"}, folder))
        useful += [grace_s] if not cost.backwards else []
        case = f"{CASE}, grace {grace_s:g} s"
        goal = 0.0 if grace_s >= _HALF_S else None
        rows += [
            row(case, "backwards redone; peer: kill", cost.backwards, kill.backwards, 1, goal),
            row(case, "forwards redone; peer: kill", cost.forwards, kill.forwards, 1),
            row(case, "pause ms; peer: kill", cost.pause_ms, kill.pause_ms, 1),
        ]
    if useful:
        metric = "least useful notice s; peer: a whole step, the longest way to a boundary"
        rows.append(row(CASE, metric, min(useful), _STANDS_FOR_S, len(graces_s)))
    return rows


def _run(fault: dict[str, Any], folder: Path) -> RunHistory:
    job = {
        "model": "timed",
        "model_args": {"layers": _STAGES, "forward_ms": _FORWARD_MS, "backward_ms": _BACKWARD_MS},
        "stages": _STAGES,
        "microbatches": _MICROBATCHES,
        "steps": _STEPS,
        "warmup_steps": 0,
        "audit": 0,
        "validate_every": 0,
    }
    faults = [{"id": "leave", "at": _AT, **fault}]
    scenario = {"version": 1, "name": "notice", "about": "one worker leaves", "job": job, "faults": faults}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        file = Path(name) / "notice.yaml"
        write_atomically(file, json.dumps(scenario))
        return run_scenario(folder, file)


def _cost(history: RunHistory) -> LeaveCost:
    runs: Counter[tuple[int, str]] = Counter()
    forwards = backwards = 0
    for done in history.of(ActionRecord):
        action = parse_action(done.action)
        if action.op in COMPUTE_OPS:
            work = (done.step, str(work_of(action)))
            again = int(runs[work] > 0)
            runs[work] += 1
            forwards += again * (action.op in FORWARD_OPS)
            backwards += again * (action.op not in FORWARD_OPS)
    begun_ns = {each.epoch: each.at_ns for each in history.of(EpochRecord) if each.epoch > 1 and not each.planned}
    gone_ns = {each.epoch: each.at_ns for each in history.of(GoRecord)}
    pause_ns = sum(gone_ns[epoch] - at_ns for epoch, at_ns in begun_ns.items() if epoch in gone_ns)
    return LeaveCost(backwards, forwards, pause_ns / 1e6)
