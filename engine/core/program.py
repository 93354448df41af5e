"""Programs: worker -> actions of one step; built from a schedule by passes, written and read as CSV.

Each pass maps a program to a program. The order of passes is `build_program`, and nothing else orders them.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import StringIO

from engine.core.action import Action, Op, parse_action
from engine.core.end_of_step import with_end_of_step
from engine.core.errors import ScheduleError
from engine.core.list_schedule import merged_compute
from engine.core.ownership import Ownership, Redundancy, Slot
from engine.core.redundant import with_redundant_forwards
from engine.core.schedule import SCHEDULES, ComputeLists
from engine.core.transfer_pass import with_transfers

Program = Mapping[int, tuple[Action, ...]]


def build_program(
    schedule: str,
    ownership: Ownership,
    redundancy: Redundancy = "none",
    healing: Collection[tuple[int, Slot]] = (),
) -> Program:
    """Returns the whole program of one step, for every worker that owns or shadows something.

    `schedule` orders a grid in which every owner has one slot; beyond, a list scheduler does. `healing` are the
    shadows, as (worker, slot), that get the state of their slot during this step.
    """
    grid = ownership.grid
    if len({*ownership.owners}) == len(ownership.owners):
        program = on_owners(SCHEDULES[schedule](grid.stages, grid.microbatches), ownership)
    else:
        program = merged_compute(ownership)
    if redundancy == "eager":
        program = with_redundant_forwards(program, ownership, healing=healing)
    program = with_transfers(program, ownership)
    return with_end_of_step(_for_all_workers(program, ownership), ownership, healing=healing)


def build_validation(ownership: Ownership) -> Program:
    """Returns the program of a validation pass: pipeline 0 runs forwards, the others rest.

    Each worker takes its forwards in the order of one wave through the pipeline, so that none waits in a circle.
    """
    grid = ownership.grid
    forwards: dict[int, list[Action]] = {}
    for wave in range(grid.stages + grid.microbatches - 1):
        for stage in range(max(0, wave - grid.microbatches + 1), min(grid.stages, wave + 1)):
            forwards.setdefault(ownership.owner(0, stage), []).append(Action(stage, Op.F, wave - stage))
    program = with_transfers({worker: tuple(actions) for worker, actions in forwards.items()}, ownership)
    return _for_all_workers(program, ownership)


def on_owners(lists: ComputeLists, ownership: Ownership) -> Program:
    """Gives every pipeline the same compute lists, each to the owner of its slot; a worker owns one slot here."""
    program: dict[int, tuple[Action, ...]] = {}
    for pipeline, stage in ownership.grid.slots():
        worker = ownership.owner(pipeline, stage)
        assert worker not in program, f"worker {worker} owns two slots of a fresh job"
        program[worker] = tuple(Action(stage, op, each, pipeline) for _, op, each, _ in lists[stage])
    return dict(sorted(program.items()))


def _for_all_workers(program: Program, ownership: Ownership) -> Program:
    return {worker: program.get(worker, ()) for worker in ownership.workers()}


def to_csv(program: Program) -> str:
    """Returns the program as CSV: row n is worker n, a cell is an action, as torch's pipelining writes it."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for worker in range(max(program, default=-1) + 1):
        writer.writerow([str(action) for action in program.get(worker, ())])
    return text.getvalue()


def from_csv(text: str) -> Program:
    """Returns the program that `text` holds; empty cells are skipped. Raises ScheduleError with worker and position."""
    program: dict[int, tuple[Action, ...]] = {}
    try:
        for worker, row in enumerate(csv.reader(StringIO(text))):
            program[worker] = tuple(_parse_row(worker, row))
    except csv.Error as error:
        raise ScheduleError(f"worker {len(program)}: expected actions as CSV: {error}") from error
    return program


def _parse_row(worker: int, row: Sequence[str]) -> Iterator[Action]:
    for position, cell in enumerate(row):
        if cell.strip():
            try:
                yield parse_action(cell)
            except ScheduleError as error:
                raise ScheduleError(f"worker {worker}, position {position}: {error}") from error
