"""The hand-over benchmarks: the stall caused by a notice, steps with one worker less, the least useful notice.

Rules: every notice, and every kill, has its own run on stages that sleep. The commits of a run give the times of its
steps: before the change of ownership, during it, and after it. The stall is the sum, over the steps during the change,
of their time minus the usual time. The usual time is the mean of six steps before the change for a step by the old
ownership, and of a dozen after it for a step by the new one. Runs without a notice, taken in between, give the same sum
over four steps: if it is near the limit, the machine is too busy to measure a stall. The benchmark fails if an action
ran twice after a notice.

With four blocks per worker, the worker in the middle of three hands over. The benchmark fails unless each neighbour
gets half of its blocks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from engine.bench.figures import BenchRow, Cases, at_most, paired_row, row
from engine.bench.runs import overhead_jobs, run_bamboo, run_with_fault, timed_flags
from engine.core.action import COMPUTE_OPS, FORWARD_OPS, parse_action
from engine.core.errors import WorkerFailedError
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ActionRecord, CommitRecord, EpochRecord, GoRecord
from engine.core.job.job import Job
from engine.core.program.remaining_tasks import work_of

CASE = "timed P=4 M=8"
BLOCKS_CASE = "timed P=3 M=8, 4 blocks each"
_BLOCKS_JOB = Job(
    model="timed",
    model_args={"layers": 12, "forward_ms": 5, "backward_ms": 10, "width": 256},
    data_args={"features": 256},
    stages=3,
    blocks=4,
    elastic=True,
    microbatches=8,
)
_MIDDLE = range(4, 8)  # the blocks of its worker
_HALVES = (0,) * 6 + (2,) * 6
_HALVES_FACTOR, _HALVES_GOAL = 162 / 120, 1.02  # of a step, by the dry runs before and after
_WARM = 2  # the first step after the warm-up
_STEP = 8  # in which the fault strikes
_STEPS = _STEP + 16  # enough to measure the usual time after the change
_BETWEEN = range(_STEP, _STEP + 4)  # the steps that stand for the change in a run without a notice
_NOTICES_PER_CALM = 5  # for each run without a notice
_STALL_PART, _STALL_MS = 0.015, 5.0  # the limit is this part of a usual step, or these milliseconds if more
_STEADY_GOAL = 1.03
_OPS = ("F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "LOG", "COMMIT", "STEP")
_OPS_OF_BLOCKS = ("F", "B", "REDUCE_GRAD", "LOG", "COMMIT", "STEP")  # between two blocks of a worker nothing is sent
_WHOLE_STAGE = frozenset({"REDUCE_GRAD", "LOG", "COMMIT", "STEP"})


@dataclass(frozen=True, slots=True)
class StepChange:
    """One run that lost a worker; times in milliseconds."""

    before_ms: float  # a usual step before
    after_ms: float  # a usual step after
    stall_ms: float


def handover_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench handover`."""
    return {
        CASE: partial(bench_handover, *((1, 1) if quick else (30, 4))),
        BLOCKS_CASE: partial(bench_blocks_handover, 1 if quick else 12),
    }


def bench_handover(num_notices: int, num_kills: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of stalls by notices, and of steps after notices and kills; raises WorkerFailedError."""
    job = replace(overhead_jobs()[CASE], steps=_STEPS)
    chosen = random.Random(0)  # noqa: S311 - every benchmark chooses the same actions
    notices, calm_ms = [], []
    for number in range(num_notices):
        stage = number % job.stages
        lacking = {0: {"RECV_F", "SEND_B"}, job.stages - 1: {"SEND_F", "RECV_B"}}.get(stage, set())
        history = _noticed(job, _an_action(chosen, stage, job, [op for op in _OPS if op not in lacking]), folder)
        _refuse_work_done_twice(history)
        notices.append(_change(history))
        if number % _NOTICES_PER_CALM == 0:
            calm_ms.append(_calm_ms(job, folder))
    kills = []
    for number in range(num_kills):
        kill = f"{_STEP}:{number % job.stages}"
        kills.append(_change(run_bamboo(folder, *timed_flags(job), "--kill", kill, "--no-twin").history))
    merged = (2 * job.microbatches + job.stages - 2) / (job.microbatches + job.stages - 1)
    metric = "steady step ms; peer: before x (2M+P-2)/(M+P-1)"  # the ideal factor for a worker with two stages
    return [
        *_stall_rows(CASE, notices, calm_ms),
        *_steady_rows(f"{CASE}, handed over", metric, notices, merged, _STEADY_GOAL),
        *_steady_rows(f"{CASE}, killed", metric, kills, merged, _STEADY_GOAL),
    ]


def bench_blocks_handover(num_notices: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of stalls by notices to the middle one of three workers; raises WorkerFailedError."""
    job = replace(_BLOCKS_JOB, steps=_STEPS)
    chosen = random.Random(0)  # noqa: S311 - every benchmark chooses the same actions
    notices, calm_ms = [], []
    for number in range(num_notices):
        block = _MIDDLE[number % len(_MIDDLE)]
        history = _noticed(job, _an_action(chosen, block, job, _OPS_OF_BLOCKS), folder)
        _refuse_work_done_twice(history)
        owners = history.of(EpochRecord)[-1].owners
        if owners != _HALVES:
            raise WorkerFailedError(f"the owners after a notice are {owners}, not {_HALVES}")
        notices.append(_change(history))
        if number % _NOTICES_PER_CALM == 0:
            calm_ms.append(_calm_ms(job, folder))
    metric = "steady step ms; peer: before x 162/120"
    return [
        *_stall_rows(BLOCKS_CASE, notices, calm_ms),
        *_steady_rows(f"{BLOCKS_CASE}, handed over", metric, notices, _HALVES_FACTOR, _HALVES_GOAL),
    ]


def _an_action(chosen: random.Random, stage: int, job: Job, ops: Sequence[str]) -> Mapping[str, Any]:
    """Returns a random moment in the schedule of this stage's worker."""
    op = chosen.choice(ops)
    at = {"step": _STEP, "stage": stage, "action": op, "when": chosen.choice(["before", "after"])}
    return at if op in _WHOLE_STAGE else at | {"microbatch": chosen.randrange(job.microbatches)}


def _noticed(job: Job, at: Mapping[str, Any], folder: Path) -> RunHistory:
    names = "model model_args data_args stages blocks elastic microbatches steps warmup_steps".split()
    fields = {name: getattr(job, name) for name in names} | {"audit": 0, "validate_every": 0}
    return run_with_fault(folder, fields, {"id": "notice", "at": at, "do": "terminate", "grace": "60s"})


def _calm_ms(job: Job, folder: Path) -> float:
    """Returns the sum that would be the stall, for a run without a notice."""
    took_ms = _took_ms(run_bamboo(folder, *timed_flags(job)).history)
    usual_ms = fmean(ms for step, ms in took_ms.items() if step >= _WARM and step not in _BETWEEN)
    return sum(took_ms[step] - usual_ms for step in _BETWEEN)


def _refuse_work_done_twice(history: RunHistory) -> None:
    keys = set()
    for done in history.of(ActionRecord):
        if parse_action(done.action).op in COMPUTE_OPS:
            key = (done.step, done.action)
            if key in keys:
                raise WorkerFailedError(f"{done.action} of step {done.step} ran twice, after a notice in time")
            keys.add(key)


def _commits_ns(history: RunHistory) -> dict[int, int]:
    return {each.step: each.at_ns for each in history.of(CommitRecord)}


def _took_ms(history: RunHistory) -> dict[int, float]:
    """Returns the milliseconds of each step but the first, from one commit to the next."""
    return {
        later[0]: (later[1] - earlier[1]) / 1e6 for earlier, later in pairwise(sorted(_commits_ns(history).items()))
    }


def _change(history: RunHistory) -> StepChange:
    """Returns the times of the steps before, during and after the change of ownership."""
    commits_ns, took_ms = _commits_ns(history), _took_ms(history)
    epochs = history.of(EpochRecord)
    handed = next(each for each in epochs if each.owners != epochs[0].owners)
    old = max(step for step, at_ns in commits_ns.items() if at_ns <= handed.at_ns)  # the last of the old ownership
    settled = 1 + next(step for step, at_ns in sorted(commits_ns.items()) if at_ns > epochs[-1].at_ns)
    last = max(commits_ns)
    before_ms = fmean(took_ms[step] for step in range(_WARM, _STEP))
    after_ms = fmean(took_ms[step] for step in range(settled + 1, last + 1))
    stall_ms = sum(took_ms[step] - before_ms for step in range(_STEP, old + 1))
    stall_ms += sum(took_ms[step] - after_ms for step in range(old + 1, settled + 1))
    return StepChange(before_ms, after_ms, stall_ms)


def _stall_rows(case: str, notices: Sequence[StepChange], calm_ms: Sequence[float]) -> list[BenchRow]:
    limit_ms = median(max(_STALL_PART * each.before_ms, _STALL_MS) for each in notices)
    stalls_ms = [each.stall_ms for each in notices]
    figures = {"median": median(stalls_ms), "9 of 10 within": at_most(stalls_ms, 0.9), "most": max(stalls_ms)}
    rows = [
        row(f"{case}, SIGTERM", f"stall ms, {name}; peer: limit", stall_ms, limit_ms, len(stalls_ms), limit_ms)
        for name, stall_ms in figures.items()
    ]
    metric = "the same sum ms, median; peer: limit"
    return [*rows, row(f"{case}, nothing happens", metric, median(calm_ms), limit_ms, len(calm_ms))]


def _steady_rows(case: str, metric: str, changes: Sequence[StepChange], factor: float, goal: float) -> list[BenchRow]:
    """Returns the time of a step after, beside a step before times the ideal factor."""
    if not changes:
        return []
    ideals_ms = [each.before_ms * factor for each in changes]
    return [paired_row(case, metric, [each.after_ms for each in changes], ideals_ms, goal)]


# The work and the pause that a notice of some length saves, beside the same leave as a kill.
#
# Rules: the stages sleep, and a usual step stands for one of 30 s, so graces of 0 to 120 s take four steps at most.
# Every grace has its own run, and strikes after the same backward; a grace of 0 is the kill. A pause is the time in
# which the workers agree on an epoch; a prepared epoch has none. The least useful notice is the shortest one that was
# tried and after which no backward ran twice.

_NOTICE_CASE = "timed P=3 M=8, a step as 30 s"
_STANDS_FOR_S = 30.0
_FORWARD_MS, _BACKWARD_MS = 30, 60
_NOTICE_STAGES, _NOTICE_MICROBATCHES = 3, 8
_STEP_S = (_NOTICE_MICROBATCHES + _NOTICE_STAGES - 1) * (_FORWARD_MS + _BACKWARD_MS) / 1e3
_GRACES_S = (3.75, 7.5, 15.0, 30.0, 60.0, 120.0)
_HALF_S = _STANDS_FOR_S / 2
_NOTICE_STEPS = 4
_NOTICE_AT = {"step": 2, "stage": 1, "action": "B", "microbatch": 2, "when": "after"}


@dataclass(frozen=True, slots=True)
class LeaveCost:
    """The cost of one leave: the backwards and forwards that ran twice, and the pause in milliseconds."""

    backwards: int
    forwards: int
    pause_ms: float


def notice_cases(quick: bool) -> Cases:
    """Returns the only case of `bamboo bench notice`."""
    return {_NOTICE_CASE: partial(bench_notice, (_HALF_S,) if quick else _GRACES_S)}


def bench_notice(graces_s: tuple[float, ...], folder: Path) -> list[BenchRow]:
    """Returns the rows of each grace, and of the least useful notice; raises WorkerFailedError if a run failed."""
    kill = _leave_cost(_leave({"do": "kill"}, folder))
    rows, useful = [], []
    for grace_s in graces_s:
        grace_ms = round(grace_s / _STANDS_FOR_S * _STEP_S * 1e3)
        cost = _leave_cost(_leave({"do": "terminate", "grace": f"{grace_ms}ms"}, folder))
        useful += [grace_s] if not cost.backwards else []
        case = f"{_NOTICE_CASE}, grace {grace_s:g} s"
        goal = 0.0 if grace_s >= _HALF_S else None
        rows += [
            row(case, "backwards redone; peer: kill", cost.backwards, kill.backwards, 1, goal),
            row(case, "forwards redone; peer: kill", cost.forwards, kill.forwards, 1),
            row(case, "pause ms; peer: kill", cost.pause_ms, kill.pause_ms, 1),
        ]
    if useful:
        metric = "least useful notice s; peer: a whole step, the longest way to a boundary"
        rows.append(row(_NOTICE_CASE, metric, min(useful), _STANDS_FOR_S, len(graces_s)))
    return rows


def _leave(fault: dict[str, Any], folder: Path) -> RunHistory:
    job = {
        "model": "timed",
        "model_args": {"layers": _NOTICE_STAGES, "forward_ms": _FORWARD_MS, "backward_ms": _BACKWARD_MS},
        "stages": _NOTICE_STAGES,
        "microbatches": _NOTICE_MICROBATCHES,
        "steps": _NOTICE_STEPS,
        "warmup_steps": 0,
        "audit": 0,
        "validate_every": 0,
    }
    return run_with_fault(folder, job, {"id": "leave", "at": _NOTICE_AT, **fault})


def _leave_cost(history: RunHistory) -> LeaveCost:
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
