"""The comparison of schedules by dry runs with the same workers, stages, microbatches and costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.core.action import COMPUTE_OPS, SEND_OPS, Program
from engine.core.errors import Problem
from engine.core.job.job_rules import check_schedule, unsliced_schedules
from engine.core.ownership import Grid, Ownership, Redundancy, directions_of, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.dry_run import Cost, DryRun, dry_run, unit_costs
from engine.core.program.schedules import SCHEDULES


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """The dry run of one schedule. Times are in units of the costs.

    `over_ideal` is the length over the work of the busiest worker, `bubble` the share of idle time. `peak_stash` counts
    residuals of stages, each 1 / V of a worker's part of the model, and of a slice if there are any. `over_none` is the
    relative increase of the length by redundant forwards.
    """

    schedule: str
    stages_per_worker: int
    placement: str
    makespan: float
    over_ideal: float
    bubble: float
    peak_stash: int
    transfers: int
    over_none: float


@dataclass(frozen=True, slots=True)
class ScheduleComparison:
    """A row per schedule that fits; `skipped` maps the name of each other schedule to the reason."""

    rows: tuple[ComparisonRow, ...]
    skipped: dict[str, str]


def compare(
    stages: int,
    microbatches: int,
    stages_per_worker: int,
    cost: Cost = unit_costs,
    redundancy: Redundancy = "none",
    level: int = 1,
    begin: Callable[[str], object] = str,
    latency: float = 0.0,
    overlapping: bool = False,
    slices: int = 1,
) -> ScheduleComparison:
    """Returns the comparison of all schedules on stages / V workers.

    `cost` is the cost of an action of one of `stages` stages. A schedule of one stage per worker runs V stages as one,
    at V times the cost; one of two directions has half of the microbatches in each. `begin` is called with the name of
    each schedule that fits before its dry run. A transfer takes `latency`. With `overlapping` the two actions of a pair
    run at once, in a schedule that is made for it. Each of the `slices` of a microbatch has an equal part of its costs.
    """
    num_workers = stages // stages_per_worker
    rows: list[ComparisonRow] = []
    skipped: dict[str, str] = {}
    for name, schedule in SCHEDULES.items():
        v = 1 if schedule.takes(1) and not schedule.takes(stages_per_worker) else stages_per_worker
        each_way, rest = divmod(microbatches, directions_of(name))
        problems = check_schedule(name, num_workers * v, v, each_way * slices, "auto", slices)
        if rest:
            problems.append(Problem("microbatches", "an even number, half in each direction", str(microbatches)))
        if slices > 1 and name in unsliced_schedules():
            problems.append(Problem("slices", f"1 with schedule {name}", str(slices)))
        if problems:
            skipped[name] = str(problems[0])
            continue
        begin(name)
        grid = Grid(num_workers * v, each_way * slices, directions_of(name), slices=slices)
        ownership = fresh(grid, v, schedule.placement, directions_of(name))
        if redundancy == "eager":
            ownership = with_shadows(ownership, redundancy, level, ownership.workers())
        run = partial(dry_run, latency=latency / slices, overlapping=overlapping and schedule.overlaps is not None)
        rows.append(_row(name, v, ownership, redundancy, _scaled(cost, stages_per_worker // v / slices), run))
    return ScheduleComparison(tuple(rows), skipped)


DryRuns = Callable[[Program, Ownership, Cost], DryRun]


def over_none(
    run: DryRun, schedule: str, ownership: Ownership, cost: Cost = unit_costs, run_of: DryRuns = dry_run
) -> float:
    """Returns the relative increase of the length of `run` over the same step without redundancy."""
    return run.makespan / run_of(build_program(schedule, ownership), ownership, cost).makespan - 1.0


def _row(name: str, v: int, ownership: Ownership, redundancy: Redundancy, cost: Cost, run_of: DryRuns) -> ComparisonRow:
    program = build_program(name, ownership, redundancy)
    run = run_of(program, ownership, cost)
    own = [
        [action for action in actions if ownership.owner(action.pipeline, action.stage) == worker]
        for worker, actions in program.items()
    ]
    work = [sum(cost(action) for action in actions if action.op in COMPUTE_OPS) for actions in own]
    return ComparisonRow(
        schedule=name,
        stages_per_worker=v,
        placement=SCHEDULES[name].placement,
        makespan=run.makespan,
        over_ideal=run.makespan / max(work),
        bubble=run.bubble,
        peak_stash=max(run.peak_stash.values()),
        transfers=sum(action.op in SEND_OPS for actions in program.values() for action in actions),
        over_none=over_none(run, name, ownership, cost, run_of) if redundancy == "eager" else 0.0,
    )


def _scaled(cost: Cost, times: float) -> Cost:
    return lambda action: times * cost(action)
