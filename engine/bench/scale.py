"""The benchmark of scale: what a start and one death cost as the job grows, in the core alone and in real runs.

Start: the program of the worker in the middle, of its peers, and its routes, beside the program of all workers, which a
worker does not build.
Planner: worker P / 2 of a step with one stage per worker dies half-way. The plan is repaired and made from scratch, in
turns; a worker's share is its routes and its program. Real runs: timed stages, one SIGKILL half-way through the
backwards. Growth is the exponent in P: the slope of a straight line through the logarithms, by least squares.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, median

from engine.bench.figures import BenchRow, Cases, in_turns, median_interval, row
from engine.bench.recovery import MODES, STEP, KillCase, killed
from engine.core.action import Action, Op
from engine.core.checks.recoveries import PHASES
from engine.core.errors import ensure, required
from engine.core.job.job import Job
from engine.core.ownership import Grid, Ownership, fresh, with_shadows
from engine.core.program.build import baseline, build_program
from engine.core.program.dependencies import peers_of, peers_program, routes_of
from engine.core.program.inventory import Inventory, ValueRuns
from engine.core.program.owners import owners_compute, owners_program
from engine.core.program.plan_repair import Baseline
from engine.core.program.planner import PlanInput, make_plan
from engine.core.value import Kind, Value

_SCHEDULE = "1f1b"
_MICROBATCHES, _RUN_MICROBATCHES, _MOST_MICROBATCHES = 128, 32, 4096
_PROGRAM_GOAL_MS, _PROGRAM_GOAL_MIB = 5000.0, 256.0  # of one worker's part of the largest job
_PLAN_GOALS_MS = {64: 10.0, 256: 30.0, 1024: 100.0}  # by number of workers
_PAUSE_GOALS_MS = {8: 30.0, 16: 60.0, 48: 200.0}
_GROWTH_GOAL, _SHARE_GROWTH_GOAL = 1.1, 0.3
_WIDTH = 256


def scale_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench scale`."""
    planned, run = ((8, 16), (4,)) if quick else ((64, 256, 1024), (4, 8, 16, 32, 48))
    times = 1 if quick else 5
    return {
        "programs at a start": partial(_bench_programs, planned, 64 if quick else _MOST_MICROBATCHES, times),
        f"plan after one death, M={_MICROBATCHES}": partial(_bench_plan, planned, times),
        f"pause after one death, M={_RUN_MICROBATCHES}": partial(_bench_pause, run, 1 if quick else 3),
    }


# The programs
def _bench_programs(sizes: Sequence[int], most_microbatches: int, times: int, folder: Path) -> list[BenchRow]:
    rows = []
    for workers in sizes:
        case = f"{_SCHEDULE} P={workers} M={_MICROBATCHES}"
        part_ms, all_ms = (
            median(_program_ms(_SCHEDULE, workers, 1, _MICROBATCHES, is_whole=is_whole) for _ in range(times))
            for is_whole in (False, True)
        )
        rows.append(row(case, "a worker's part ms; peer: all programs", part_ms, all_ms, times))
    for schedule, per_worker in ((_SCHEDULE, 1), ("interleaved", 2)):
        few, many = (
            median(_program_ms(schedule, workers, per_worker, most_microbatches) for _ in range(times))
            for workers in (sizes[0], sizes[-1])
        )
        case = f"{schedule} P={sizes[-1]} V={per_worker} M={most_microbatches}"
        metric = f"a worker's part ms; peer: P={sizes[0]}"
        rows.append(row(case, metric, many, few, times, _PROGRAM_GOAL_MS))
        few, many = (
            _program_mib(schedule, workers, per_worker, most_microbatches) for workers in (sizes[0], sizes[-1])
        )
        rows.append(row(case, metric.replace(" ms", " MiB"), many, few, 1, _PROGRAM_GOAL_MIB))
    return rows


def _program_ms(schedule: str, workers: int, per_worker: int, microbatches: int, *, is_whole: bool = False) -> float:
    """Returns the milliseconds in which a worker builds its part of a step, or all programs."""
    ownership = with_shadows(fresh(Grid(workers * per_worker, microbatches), per_worker), "lazy", 1, range(workers))
    worker = workers // 2
    owners_compute.cache_clear()
    owners_program.cache_clear()
    begin = time.perf_counter()
    program = build_program(schedule, ownership, "lazy", only=None if is_whole else peers_of(worker, ownership))
    routes_of(worker, peers_program(worker, program, ownership), ownership)
    return 1e3 * (time.perf_counter() - begin)


def _program_mib(schedule: str, workers: int, per_worker: int, microbatches: int) -> float:
    """Returns the most memory that a worker has in use while it builds its part of a step."""
    tracemalloc.start()
    try:
        _program_ms(schedule, workers, per_worker, microbatches)
        return tracemalloc.get_traced_memory()[1] / (1 << 20)
    finally:
        tracemalloc.stop()


# The planner
def _bench_plan(sizes: Sequence[int], times: int, folder: Path) -> list[BenchRow]:
    rows, plans, shares = [], list[list[float]](), list[list[float]]()
    for workers in sizes:
        base, source = half_way(Grid(workers, _MICROBATCHES))
        _plan_times(base, source)  # what is imported and compiled at first use is not counted
        repaired, scratch, share = map(list, zip(*(_plan_times(base, source) for _ in range(times)), strict=True))
        case = f"P={workers} M={_MICROBATCHES}"
        goal = _PLAN_GOALS_MS.get(workers)
        rows.append(row(case, "plan ms; peer: from scratch", median(repaired), median(scratch), times, goal))
        rows.append(row(case, "share of an untouched worker ms; peer: plan", median(share), median(repaired), times))
        plans.append(repaired)
        shares.append(share)
    case = f"P={sizes[0]} to {sizes[-1]}, M={_MICROBATCHES}"
    rows += _growth_rows(case, "plan", sizes, plans, _GROWTH_GOAL)
    return [*rows, *_growth_rows(case, "share of an untouched worker", sizes, shares, _SHARE_GROWTH_GOAL)]


def _plan_times(base: Baseline, source: PlanInput) -> tuple[float, float, float]:
    """Returns the milliseconds of a repair, of a plan from scratch, and of the share of a distant worker."""
    at = [time.perf_counter()]
    plan = make_plan(source, base)
    at.append(time.perf_counter())
    ensure(plan.repair is not None, "the plan is a repair")
    make_plan(source)
    at.append(time.perf_counter())
    routes_of(1, peers_program(1, plan.program, source.ownership), source.ownership)
    at.append(time.perf_counter())
    repaired, scratch, share = (1e3 * (later - earlier) for earlier, later in pairwise(at))
    return repaired, scratch, share


def half_way(grid: Grid) -> tuple[Baseline, PlanInput]:
    """Returns the program of a step, and what the survivors hold when the worker in the middle dies half-way."""
    ownership = fresh(grid)
    base = required(baseline(_SCHEDULE, grid, ownership.owners), f"a step of {_SCHEDULE} can be repaired")
    victim, half = grid.stages // 2, max(starts[-1] for starts in base.starts.values()) / 2
    inventories = []
    for worker, actions in base.program.items():
        done = [action for action, start in zip(actions, base.starts[worker], strict=True) if start < half]
        stages = (worker, victim) if worker == victim - 1 else (worker,)
        inventories += [] if worker == victim else [_held(worker, stages, done)]
    owners = tuple(victim - 1 if owner == victim else owner for owner in ownership.owners)
    return base, PlanInput(2, 0, Ownership(grid, owners), tuple(inventories))


def _held(worker: int, stages: Sequence[int], done: Sequence[Action]) -> Inventory:
    """Returns what a worker holds after the first actions of its program; of the last of `stages` it has the state."""
    slot, ran = (0, worker), {op: [each.microbatch for each in done if each.op is op] for op in Op}
    values = [Value(Kind.ACTIVATION, *slot, each) for each in ran[Op.F]]
    values += [Value(Kind.GRADIENT, *slot, each) for each in ran[Op.B]]
    values += [Value(Kind.RESIDUAL, *slot, each) for each in ran[Op.F] if each not in ran[Op.B]]
    values += [Value(Kind.ACTIVATION, 0, worker - 1, each) for each in ran[Op.RECV_F] if each not in ran[Op.F]]
    values += [Value(Kind.GRADIENT, 0, worker + 1, each) for each in ran[Op.RECV_B] if each not in ran[Op.B]]
    counted, added = {slot: len(ran[Op.F])}, {slot: len(ran[Op.B])}
    return Inventory(worker, 1, tuple((0, stage) for stage in stages), counted, added, (), ValueRuns(values))


# Real runs
def _bench_pause(sizes: Sequence[int], times: int, folder: Path) -> list[BenchRow]:
    cases = {workers: _timed_case(workers) for workers in sizes}
    sides = {workers: partial(killed, case, MODES["lazy"], 0.5, folder) for workers, case in cases.items()}
    kills = in_turns(sides, times)
    rows, rests = [], []
    for workers, figures in kills.items():
        case = cases[workers].name
        pause_ms = median(each.pause_ms for each in figures)
        rests.append([each.pause_ms - each.phases_ms["replay"] for each in figures])
        goal = _PAUSE_GOALS_MS.get(workers)
        rows.append(row(case, "pause less replay ms; peer: pause", median(rests[-1]), pause_ms, times, goal))
        for phase in PHASES:
            phase_ms = median(each.phases_ms.get(phase, 0.0) for each in figures)
            rows.append(row(case, f"{phase} ms; peer: pause", phase_ms, pause_ms, times))
    case = f"timed P={sizes[0]} to {sizes[-1]}, M={_RUN_MICROBATCHES}"
    return [*rows, *_growth_rows(case, "pause less replay", sizes, rests, None)]


def _timed_case(workers: int) -> KillCase:
    job = Job(steps=STEP + 3, stages=workers, microbatches=_RUN_MICROBATCHES, validate_every=0, warmup_steps=0)
    job = replace(job, model="timed", model_args={"layers": workers, "width": _WIDTH}, data_args={"features": _WIDTH})
    return KillCase(f"timed P={workers} M={_RUN_MICROBATCHES}", job, workers // 2)


def _growth_rows(
    case: str, name: str, sizes: Sequence[int], figures: Sequence[Sequence[float]], goal: float | None
) -> list[BenchRow]:
    """Returns the exponent of growth in P with the ends of its 95 % interval, from one line for each round."""
    if len(sizes) < 2:
        return []
    logarithms = [math.log(size) for size in sizes]
    slopes = [
        linear_regression(logarithms, [*map(math.log, of_round)]).slope for of_round in zip(*figures, strict=True)
    ]
    middle, low, high = median_interval(slopes)
    metric, n = f"{name}: exponent in P; peer: linear", len(slopes)
    return [
        row(case, metric, middle, 1.0, n, goal),
        row(case, f"{metric}, low end of 95 %", low, 1.0, n),
        row(case, f"{metric}, high end of 95 %", high, 1.0, n),
    ]
