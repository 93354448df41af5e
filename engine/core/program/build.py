"""Programs: worker -> actions of one step; built from a schedule by passes, written and read as CSV.

Each pass maps a program to a program. The order of passes is `build_program`, and nothing else orders them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import groupby

from engine.core.action import COMPUTE_OPS, FORWARD_OPS, Action, Op, Program
from engine.core.errors import ensure
from engine.core.ownership import Grid, Ownership, Redundancy, Slot
from engine.core.program.dry_run import dry_run
from engine.core.program.passes import (
    with_end_of_step,
    with_redundant_forwards,
    with_streams,
    with_transfers,
    with_unshards,
    with_whole_stages,
)
from engine.core.program.plan_repair import Baseline, baseline_of
from engine.core.program.remaining_tasks import merged_compute
from engine.core.program.schedule_csv import has_pairs, is_text, lists_from_csv, rows_from_csv, rows_to_csv
from engine.core.program.schedules import SCHEDULES, ComputeLists, in_blocks, with_pairs_together


def build_program(
    schedule: str,
    ownership: Ownership,
    redundancy: Redundancy = "none",
    healing: Collection[tuple[int, Slot]] = (),
    log_every: int = 0,
) -> Program:
    """Returns the whole program of one step, for every worker that owns or shadows a slot.

    `schedule`, a name or compute lists as CSV, orders the actions while every worker owns the stages of a fresh job;
    otherwise the list scheduler does. `healing` are the shadows, as (worker, slot), that get the state of their slot
    during this step. Accumulators are streamed after every `log_every` microbatches; 0 turns this off.
    """
    grid, owners = ownership.grid, ownership.owners
    compute, is_scheduled = _owners_compute(schedule, grid, owners)
    if redundancy == "eager" or grid.fsdp:
        program = compute
        if redundancy == "eager":
            program = with_redundant_forwards(program, ownership, healing=healing)
        if grid.fsdp:
            program = with_unshards(program, grid.fsdp) if is_scheduled else with_whole_stages(program, ownership)
        program = with_transfers(program, ownership)
    else:
        program = owners_program(schedule, grid, owners)
    program = _for_all_workers(program, ownership)
    if is_scheduled and overlaps(schedule):
        program = with_pairs_together(program)
    program = with_streams(program, ownership, log_every, healing)
    return with_end_of_step(program, ownership, healing=healing)


@lru_cache(maxsize=4)
def owners_program(schedule: str, grid: Grid, owners: tuple[int, ...]) -> Program:
    """Returns the compute actions of a step by the owners alone, with their transfers; no stage is in shards."""
    return with_transfers(_owners_compute(schedule, grid, owners)[0], Ownership(grid, owners))


@lru_cache(maxsize=4)
def baseline(schedule: str, grid: Grid, owners: tuple[int, ...]) -> Baseline | None:
    """Returns what the repair of a step with these owners looks up; None if such a step is always planned from scratch.

    It is if stages are in shards, and if all workers run all their forwards first: merged in that order, two stages
    take up to a fifth longer than in the order of the planner.
    """
    if grid.fsdp:
        return None
    program = owners_program(schedule, grid, owners)
    if all(map(_runs_forwards_first, program.values())):
        return None
    starts: dict[int, list[float]] = {worker: [] for worker in program}
    for start, _, worker, _ in dry_run(program, Ownership(grid, owners)).spans:
        starts[worker].append(start)
    return baseline_of(program, starts, grid, owners)


def _runs_forwards_first(actions: Iterable[Action]) -> bool:
    are_forwards = [op in FORWARD_OPS for _, op, _, _ in actions if op in COMPUTE_OPS]
    return all(are_forwards[: sum(are_forwards)])


@lru_cache(maxsize=4)
def _owners_compute(schedule: str, grid: Grid, owners: tuple[int, ...]) -> tuple[Program, bool]:
    """Returns the compute actions of the owners, and whether the schedule orders them, not the list scheduler."""
    ownership = Ownership(grid, owners)
    lists = _lists(schedule, ownership)
    return (merged_compute(ownership), False) if lists is None else (on_owners(lists, ownership), True)


def overlaps(schedule: str) -> bool:
    """Says whether a schedule, a name or CSV, runs forwards and backwards at once."""
    return has_pairs(schedule) if is_text(schedule) else SCHEDULES[schedule].overlaps


def build_validation(ownership: Ownership) -> Program:
    """Returns the program of a validation pass: pipeline 0 runs forwards, the others rest.

    Each worker runs its forwards in the order of one wave through the pipeline, so that workers never wait in a circle.
    A wave moves on by the neighbouring slots of one worker.

        worker 0   0F0 0F1 0F2
        worker 1       1F0 1F1 1F2
    """
    grid = ownership.grid
    runs = [(owner, tuple(run)) for owner, run in groupby(range(grid.stages), lambda stage: ownership.owner(0, stage))]
    forwards: dict[int, list[Action]] = {}
    for wave in range(len(runs) + grid.microbatches - 1):
        for place in range(max(0, wave - grid.microbatches + 1), min(len(runs), wave + 1)):
            owner, run = runs[place]
            forwards.setdefault(owner, []).extend(Action(stage, Op.F, wave - place) for stage in run)
    program = with_transfers({worker: tuple(actions) for worker, actions in forwards.items()}, ownership)
    return _for_all_workers(program, ownership)


def _lists(schedule: str, ownership: Ownership) -> ComputeLists | None:
    """Returns the compute lists of each pipeline; None if a stage is not on its worker of a fresh job."""
    grid, teams = ownership.grid, []
    for pipeline in range(grid.pipelines):
        first = pipeline * grid.stages
        teams.append(tuple(dict.fromkeys(ownership.owners[first : first + grid.stages])))
    num_workers = len(teams[0])
    if len({worker for team in teams for worker in team}) != grid.pipelines * num_workers:
        return None
    if is_text(schedule):
        lists = lists_from_csv(schedule)
    else:
        stages_per_worker, rest = divmod(grid.stages // grid.blocks, num_workers)
        known = SCHEDULES[schedule]
        if rest or not known.takes(stages_per_worker) or grid.microbatches < known.least_microbatches(num_workers):
            return None
        lists = in_blocks(known(num_workers, grid.microbatches, stages_per_worker), grid.blocks)
    for line in lists:
        stages = {action.stage for action in line}
        for pipeline in range(grid.pipelines):
            if len({ownership.owner(pipeline, stage) for stage in stages}) != 1:
                return None
    return lists if len(lists) == num_workers else None


def on_owners(lists: ComputeLists, ownership: Ownership) -> Program:
    """Gives every pipeline the same compute lists, each to the owner of its stages."""
    program: dict[int, tuple[Action, ...]] = {}
    for pipeline in range(ownership.grid.pipelines):
        for line in lists:
            worker = ownership.owner(pipeline, line[0].stage)
            ensure(worker not in program, f"worker {worker} owns the stages of two lists")
            mine = line if pipeline == 0 else tuple(Action(stage, op, each, pipeline) for stage, op, each, _ in line)
            program[worker] = mine
    return dict(sorted(program.items()))


def _for_all_workers(program: Program, ownership: Ownership) -> Program:
    return {worker: program.get(worker, ()) for worker in ownership.workers()}


def to_csv(program: Program, pairs: bool = False) -> str:
    """Returns the program as CSV: row n is worker n, a cell is an action, or a pair of them, as torch writes it."""
    return rows_to_csv((program.get(worker, ()) for worker in range(max(program, default=-1) + 1)), pairs)


def from_csv(text: str) -> Program:
    """Returns the program that `text` holds; empty cells are skipped. Raises ScheduleError with worker and position."""
    return dict(enumerate(rows_from_csv(text)))
