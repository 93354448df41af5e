"""The benchmark of scale: what a start and one death cost as the job grows, in the core alone and in real runs.

Start: the program of the worker in the middle, of its peers, and its routes, beside the program of all workers, which a
worker does not build.
Planner: worker P / 2 of a step with one stage per worker dies half-way. The plan is repaired and made from scratch, in
turns; a worker's share is its routes and its program. The messages of that death are counted as they travel.
Real runs: timed stages, one SIGKILL half-way through the backwards. Processor time by phase is that of the whole
machine, by ticks of 10 ms: beside other work it says nothing. Waiting workers: the processor time that a run takes
with and without them. Growth is the exponent in P: the slope of a straight line through the logarithms, by least
squares.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, median

import psutil

from engine.bench.figures import BenchRow, Cases, in_turns, median_interval, row
from engine.bench.recovery import MODES, STEP, KillCase, KillFigures, killed
from engine.bench.runs import timed_flags, watched_bamboo
from engine.codec.messages import encode
from engine.core.action import Action, Op
from engine.core.checks.recoveries import PHASES
from engine.core.errors import ensure, required
from engine.core.history.process_records import StartedRecord, WaitingRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CommitRecord
from engine.core.job.job import Job
from engine.core.message_kinds import MAX_BYTES
from engine.core.ownership import Grid, Members, Ownership, fresh, with_shadows
from engine.core.program.ballot import SlotVote, VoteMessage, open_ballot
from engine.core.program.build import baseline, build_program
from engine.core.program.dependencies import peers_of, peers_program, routes_of
from engine.core.program.inventory import Inventory, InventoryMessage, PlanMessage, ValueRuns, to_json
from engine.core.program.owners import owners_compute, owners_program
from engine.core.program.plan_parts import first_grid
from engine.core.program.plan_repair import Baseline
from engine.core.program.planner import PlanInput, make_plan
from engine.core.protocol.plan_orders import in_parts, with_repair
from engine.core.value import Kind, Value

_SCHEDULE = "1f1b"
_MICROBATCHES, _RUN_MICROBATCHES, _MOST_MICROBATCHES = 128, 32, 4096
_PROGRAM_GOAL_MS, _PROGRAM_GOAL_MIB = 5000.0, 256.0  # of one worker's part of the largest job
_PLAN_GOALS_MS = {64: 10.0, 256: 30.0, 1024: 100.0}  # by number of workers
_PAUSE_GOALS_MS = {8: 30.0, 16: 60.0, 48: 200.0}
_GROWTH_GOAL, _SHARE_GROWTH_GOAL = 1.1, 0.3
_LEAST = 0.01  # percent of a core: a short look may see no tick
_WAITING_GOAL = 2.0  # percent of a core per 100 waiting workers
_WIDTH = 256


def scale_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench scale`."""
    planned, run = ((8, 16), (4,)) if quick else ((64, 256, 1024), (4, 8, 16, 32, 48, 64))
    times, grids = 1 if quick else 5, ((2, 2),) if quick else ((2, 8), (4, 4), (4, 8))
    members, waiting = (2, 2) if quick else (8, 100)
    return {
        "programs at a start": partial(_bench_programs, planned, 64 if quick else _MOST_MICROBATCHES, times),
        f"plan after one death, M={_MICROBATCHES}": partial(_bench_plan, planned, times),
        "votes of a step": partial(_bench_votes, planned, times),
        f"messages of one death, M={_MICROBATCHES}": partial(_bench_messages, planned),
        f"pause after one death, M={_RUN_MICROBATCHES}": partial(_bench_pause, run, 1 if quick else 3),
        f"pause after one death, D x P, M={_RUN_MICROBATCHES}": partial(_bench_grids, grids, 1 if quick else 3),
        "waiting workers": partial(_bench_waiting, members, waiting, 2.0 if quick else 20.0),
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


# The messages
def _bench_messages(sizes: Sequence[int], folder: Path) -> list[BenchRow]:
    """Returns the rows of the inventories and plans of one death, as they travel, and of the links of all workers."""
    rows, bytes_of = [], []
    for workers in sizes:
        base, source = half_way(Grid(workers, _MICROBATCHES))
        inventories = tuple((each.worker, to_json(each)) for each in source.inventories)
        messages = [encode(InventoryMessage(source.epoch, text, ())) for _, text in inventories]
        none: tuple[tuple[int, ...], ...] = ((),) * workers
        members, owners = tuple(worker for worker, _ in inventories), source.ownership.owners
        document = PlanMessage(source.epoch, 0, members, (), owners, none, inventories, before=base.owners)
        job = Job(stages=workers, microbatches=_MICROBATCHES, schedule=_SCHEDULE)
        grid = first_grid(1, Members.of(range(workers)), Ownership(source.ownership.grid, base.owners))
        for tell in in_parts(job, grid, with_repair(job, document), members):
            messages += [encode(tell.message)] * len(tell.workers)
        total_kb, case = sum(map(len, messages)) / 1e3, f"P={workers} M={_MICROBATCHES}"
        bytes_of.append([total_kb])
        rows.append(row(case, "inventories and plans kB; peer: the document to all", total_kb, _whole_kb(document), 1))
        rows.append(row(case, "the longest message kB; peer: limit", max(map(len, messages)) / 1e3, MAX_BYTES / 1e3, 1))
        ownership = source.ownership
        links = sum(len(peers_of(worker, ownership)) - 1 for worker in members) / 2
        rows.append(row(case, "links; peer: all pairs", links, math.comb(len(members), 2), 1))
    case = f"P={sizes[0]} to {sizes[-1]}, M={_MICROBATCHES}"
    return [*rows, *_growth_rows(case, "inventories and plans kB", sizes, bytes_of, _GROWTH_GOAL)]


def _whole_kb(document: PlanMessage) -> float:
    return len(document.members) * len(encode(document)) / 1e3


def _bench_votes(sizes: Sequence[int], times: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of the time in which the votes of a step are counted; each worker has a replica of two slots."""
    rows, taken = [], list[list[float]]()
    for workers in sizes:
        ownership = with_shadows(fresh(Grid(workers, 1)), "lazy", 1, range(workers))
        votes = [
            (worker, VoteMessage(1, 0, tuple(SlotVote(*slot, loss=0.0) for slot in ownership.held_by(worker))))
            for worker in range(workers)
        ]
        taken.append(
            [_votes_ms(ownership, votes) for _ in range(times + 1)][1:]
        )  # what is looked up once is not counted
        each_us = 1e3 * median(taken[-1]) / workers
        rows.append(row(f"P={workers}", "votes ms; peer: of a worker us", median(taken[-1]), each_us, times))
    return [*rows, *_growth_rows(f"P={sizes[0]} to {sizes[-1]}", "votes", sizes, taken, _GROWTH_GOAL)]


def _votes_ms(ownership: Ownership, votes: Sequence[tuple[int, VoteMessage]]) -> float:
    ballot, commit, begin = open_ballot(1, 0, ownership, 0.0), None, time.perf_counter()
    for worker, vote in votes:
        ballot, commit = ballot.add(worker, vote)
    ensure(commit is not None, "the last vote commits")
    return 1e3 * (time.perf_counter() - begin)


# Real runs
def _bench_pause(sizes: Sequence[int], times: int, folder: Path) -> list[BenchRow]:
    goals = {_timed_case(workers).name: goal for workers, goal in _PAUSE_GOALS_MS.items()}
    kills = _kills([_timed_case(workers) for workers in sizes], times, folder)
    rows = [each for case, figures in kills.items() for each in _pause_rows(case, figures, goals.get(case))]
    case = f"timed P={sizes[0]} to {sizes[-1]}, M={_RUN_MICROBATCHES}"
    columns: dict[str, Callable[[KillFigures], float]] = {
        "pause less replay": lambda kill: kill.pause_ms - kill.phases_ms["replay"],
        "CPU of the pause less replay": lambda kill: max(1.0, sum(kill.cpu_ms.values()) - kill.cpu_ms["replay"]),
        "peak memory of all": lambda kill: sum(kill.peaks_mib),
    }
    for name, figure in columns.items():
        rows += _growth_rows(case, name, sizes, [[*map(figure, figures)] for figures in kills.values()], None)
    return rows


def _bench_grids(grids: Sequence[tuple[int, int]], times: int, folder: Path) -> list[BenchRow]:
    kills = _kills([_timed_case(workers, pipelines) for pipelines, workers in grids], times, folder)
    return [each for case, figures in kills.items() for each in _pause_rows(case, figures, None)]


def _kills(cases: Sequence[KillCase], times: int, folder: Path) -> dict[str, list[KillFigures]]:
    return in_turns({case.name: partial(killed, case, MODES["lazy"], 0.5, folder) for case in cases}, times)


def _pause_rows(case: str, figures: Sequence[KillFigures], goal: float | None) -> list[BenchRow]:
    times, pause_ms = len(figures), median(each.pause_ms for each in figures)
    rest_ms = median(each.pause_ms - each.phases_ms["replay"] for each in figures)
    rows = [row(case, "pause less replay ms; peer: pause", rest_ms, pause_ms, times, goal)]
    for phase in PHASES:
        phase_ms = median(each.phases_ms.get(phase, 0.0) for each in figures)
        rows.append(row(case, f"{phase} ms; peer: pause", phase_ms, pause_ms, times))
    all_ms = median(sum(each.cpu_ms.values()) for each in figures)
    for phase in PHASES:
        cpu_ms = median(each.cpu_ms[phase] for each in figures)
        rows.append(row(case, f"{phase}, CPU ms of all processes; peer: of the pause", cpu_ms, max(all_ms, 1.0), times))
    total_mib, most_mib = (median(of(each.peaks_mib) for each in figures) for of in (sum, max))
    return [*rows, row(case, "peak memory of all survivors MiB; peer: of the largest", total_mib, most_mib, times)]


def _timed_case(workers: int, pipelines: int = 1) -> KillCase:
    job = Job(steps=STEP + 3, stages=workers, microbatches=_RUN_MICROBATCHES, validate_every=0, warmup_steps=0)
    job = replace(job, model="timed", model_args={"layers": workers, "width": _WIDTH}, data_args={"features": _WIDTH})
    shape = f"D={pipelines} " * (pipelines > 1) + f"P={workers}"
    return KillCase(f"timed {shape} M={_RUN_MICROBATCHES}", replace(job, pipelines=pipelines), workers // 2)


def _bench_waiting(members: int, waiting: int, seconds: float, folder: Path) -> list[BenchRow]:
    """Returns the rows of the processor time that waiting workers take: their own, and that of the launcher."""
    alone, _ = _busy_parts(members, 0, seconds, folder)
    launcher, own = _busy_parts(members, waiting, seconds, folder)
    case, per = f"timed P={members}, {waiting} waiting", 100 / waiting
    both = per * (launcher - alone + own)
    return [
        row(case, "launcher % of a core; peer: none waits", launcher, alone, 1),
        row(case, "waiting workers % of a core; peer: launcher", own, launcher, 1),
        row(case, "all that 100 waiting workers take % of a core; peer: limit", both, _WAITING_GOAL, 1, _WAITING_GOAL),
    ]


def _busy_parts(members: int, waiting: int, seconds: float, folder: Path) -> tuple[float, float]:
    """Returns the percent of a core that the launcher of a run takes in training, and its waiting workers."""
    job = replace(_timed_case(members).job, steps=100_000, standby=waiting)

    def look(launcher: int, history: RunHistory) -> tuple[float, float] | None:
        there = {each.of for each in history.of(WaitingRecord)}
        if len(there) < waiting or len(history.of(CommitRecord)) < 2:
            return None
        pids = [each.child for each in history.of(StartedRecord) if each.of in there]
        before = _cpu_s([launcher]), _cpu_s(pids)
        time.sleep(seconds)
        after = _cpu_s([launcher]), _cpu_s(pids)
        first, second = (100 * (late - early) / seconds for early, late in zip(before, after, strict=True))
        return max(first, _LEAST), second

    return watched_bamboo(folder, look, *timed_flags(job))


def _cpu_s(pids: Sequence[int]) -> float:
    """Returns the seconds that processes have had a core."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


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
