"""Programs: worker -> actions of one step; built from a schedule by passes, written and read as CSV.

Each pass maps a program to a program. The order of passes is `build_program`, and nothing else orders them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import groupby

from engine.core.action import COMPUTE_OPS, FORWARD_OPS, Action, Op, Program
from engine.core.ownership import Grid, Ownership, Redundancy, Slot
from engine.core.program.dependencies import peers_of
from engine.core.program.dry_run import starts_of
from engine.core.program.offload import line_with_offloads
from engine.core.program.owners import owners_compute, owners_program
from engine.core.program.passes import (
    with_end_of_step,
    with_redundant_forwards,
    with_streams,
    with_transfers,
    with_unshards,
    with_whole_stages,
)
from engine.core.program.plan_repair import Baseline, baseline_of
from engine.core.program.schedule_csv import is_text, named_pairs, placed_rows, rows_to_csv
from engine.core.program.schedules import SCHEDULES, IsPair, in_blocks, of_kind, with_pairs_together


def build_program(
    schedule: str,
    ownership: Ownership,
    redundancy: Redundancy = "none",
    healing: Collection[tuple[int, Slot]] = (),
    log_every: int = 0,
    only: Collection[int] | None = None,
    copy_time: float | None = None,
) -> Program:
    """Returns the whole program of one step, for every worker that owns or shadows a slot.

    `schedule`, a name or compute lists as CSV, orders the actions while every worker owns the stages of a fresh job;
    otherwise the list scheduler does. `healing` are the shadows, as (worker, slot), that get the state of their slot
    during this step. Accumulators are streamed after every `log_every` microbatches; 0 turns this off. Residuals that
    take `copy_time` forwards to the host, and as long back, are offloaded; None turns this off. With `only` the
    programs of these workers alone are returned. The others are then built only if the list scheduler, redundant
    forwards or streams need the times of a whole step.
    """
    grid, owners, workers = ownership.grid, ownership.owners, ownership.workers()
    compute = owners_compute(schedule, grid, owners)
    wanted = workers if only is None else tuple(worker for worker in workers if worker in only)
    asked = workers if log_every else wanted
    program: Program
    if redundancy == "eager" or grid.fsdp:
        program = compute.program()
        if redundancy == "eager":
            program = with_redundant_forwards(program, ownership, healing=healing)
        if grid.fsdp:
            most = grid.fsdp * compute.most_blocks
            is_scheduled = compute.is_scheduled
            program = with_unshards(program, most) if is_scheduled else with_whole_stages(program, ownership)
        program = with_transfers(program, ownership)
    else:
        of_owners = owners_program(schedule, grid, owners)
        program = of_owners.whole() if asked == workers else of_owners
    program = {worker: program.get(worker, ()) for worker in asked}
    if compute.is_scheduled and (is_pair := pairs_in(schedule, grid.blocks)):
        program = with_pairs_together(program, is_pair)
    program = with_streams(program, ownership, log_every, healing)
    program = {worker: program[worker] for worker in wanted}
    if copy_time is not None:
        program = {worker: line_with_offloads(line, copy_time, grid.slices) for worker, line in program.items()}
    return with_end_of_step(program, ownership, healing=healing)


@lru_cache(maxsize=4)
def baseline(schedule: str, grid: Grid, owners: tuple[int, ...]) -> Baseline | None:
    """Returns what the repair of a step looks up; None for shards, slices, and if all workers run all forwards first.

    Merged in that order, two stages take up to a fifth longer than in the order of the planner.
    """
    if grid.fsdp or grid.slices > 1:
        return None
    program = owners_program(schedule, grid, owners)
    if all(map(_runs_forwards_first, program.values())):
        return None
    return baseline_of(program, starts_of(program, Ownership(grid, owners)), grid, owners)


def _runs_forwards_first(actions: Iterable[Action]) -> bool:
    are_forwards = [op in FORWARD_OPS for _, op, _, _ in actions if op in COMPUTE_OPS]
    return all(are_forwards[: sum(are_forwards)])


def pairs_in(schedule: str, blocks: int = 1) -> IsPair | None:
    """Returns which actions a schedule, a name or CSV, wants run at once; None if it wants none."""
    if not is_text(schedule):
        return of_kind(kind) if (kind := SCHEDULES[schedule].overlaps) else None
    pairs = ((first, second) for _, _, first, second in named_pairs(schedule))
    named = {(in_blocks((first,), blocks)[-1], in_blocks((second,), blocks)[0]) for first, second in pairs}
    return (lambda first, second: (first._replace(pipeline=0), second._replace(pipeline=0)) in named) if named else None


def build_validation(ownership: Ownership, only: Collection[int] | None = None) -> Program:
    """Returns the program of a validation pass: pipeline 0 runs forwards, the others rest; or the parts of some alone.

    Each worker runs its forwards in the order of one wave through the pipeline, so that workers never wait in a circle.
    A wave moves on by the neighbouring slots of one worker.

        worker 0   0F0 0F1 0F2
        worker 1       1F0 1F1 1F2
    """
    grid, workers = ownership.grid, ownership.workers()
    wanted = workers if only is None else tuple(worker for worker in workers if worker in only)
    beside = wanted if only is None else {each for worker in wanted for each in peers_of(worker, ownership)}
    runs = [(owner, tuple(run)) for owner, run in groupby(range(grid.stages), lambda stage: ownership.owner(0, stage))]
    forwards: dict[int, list[tuple[int, int]]] = {}  # number of the wave, place of the run
    for place, (owner, _) in enumerate(runs):
        if owner in beside:
            forwards.setdefault(owner, []).extend((place + each, place) for each in range(grid.microbatches))
    lines = {
        owner: tuple(Action(stage, Op.F, wave - place) for wave, place in sorted(mine) for stage in runs[place][1])
        for owner, mine in forwards.items()
    }
    program = with_transfers(lines, ownership)
    return {worker: program.get(worker, ()) for worker in wanted}


def to_csv(program: Program, is_pair: IsPair | None = None) -> str:
    """Returns the program as CSV: row n is worker n, a cell is an action, or a pair of them, as torch writes it."""
    return rows_to_csv((program.get(worker, ()) for worker in range(max(program, default=-1) + 1)), is_pair)


def from_csv(text: str) -> Program:
    """Returns the program that `text` holds; empty cells are skipped. Raises ScheduleError with worker and position."""
    return {worker: tuple(action for _, action in row) for worker, row in enumerate(placed_rows(text))}
