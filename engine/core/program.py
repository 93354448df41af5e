"""Programs: worker -> actions of one step; built from a schedule by passes, written and read as CSV.

Each pass maps a program to a program. The order of passes is `build_program`, and nothing else orders them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import StringIO

from engine.core.action import COMPUTE_OPS, Action, Op, parse_action
from engine.core.errors import ScheduleError
from engine.core.ownership import Ownership
from engine.core.schedule import SCHEDULES, ComputeLists, forward_only

Program = Mapping[int, tuple[Action, ...]]


def build_program(schedule: str, ownership: Ownership) -> Program:
    """Returns the whole program of one step: compute, transfers, reduction, commit and step."""
    grid = ownership.grid
    compute = on_owners(SCHEDULES[schedule](grid.stages, grid.microbatches), ownership)
    return with_commit(with_transfers(compute, ownership), ownership)


def build_validation(ownership: Ownership) -> Program:
    """Returns the program of a validation pass: pipeline 0 runs forwards, the others rest."""
    grid = replace(ownership.grid, pipelines=1)
    first = Ownership(grid, ownership.owners[: grid.stages])
    program = with_transfers(on_owners(forward_only(grid.stages, grid.microbatches), first), first)
    return {worker: program.get(worker, ()) for worker in ownership.workers()}


def on_owners(lists: ComputeLists, ownership: Ownership) -> Program:
    """Gives every pipeline the same compute lists, each to the owner of its slot; a worker owns one slot here."""
    program: dict[int, tuple[Action, ...]] = {}
    for pipeline, stage in ownership.grid.slots():
        worker = ownership.owner(pipeline, stage)
        assert worker not in program, f"worker {worker} owns two slots of a fresh job"
        program[worker] = tuple(replace(action, pipeline=pipeline) for action in lists[stage])
    return dict(sorted(program.items()))


def with_transfers(program: Program, ownership: Ownership) -> Program:
    """Adds a receive before each compute action whose input is made elsewhere, a send after each that others need."""
    return {
        worker: tuple(part for action in actions for part in _with_its_transfers(action, worker, ownership))
        for worker, actions in program.items()
    }


def _with_its_transfers(action: Action, worker: int, ownership: Ownership) -> tuple[Action, ...]:
    if action.op not in COMPUTE_OPS:
        return (action,)
    forward = action.op is Op.F
    source, target = (-1, 1) if forward else (1, -1)
    receive, send = (Op.RECV_F, Op.SEND_F) if forward else (Op.RECV_B, Op.SEND_B)

    def elsewhere(stage: int) -> bool:
        return 0 <= stage < ownership.grid.stages and ownership.owner(action.pipeline, stage) != worker

    parts = [action]
    if elsewhere(action.stage + source):
        parts.insert(0, replace(action, op=receive))
    if elsewhere(action.stage + target):
        parts.append(replace(action, op=send))
    return tuple(parts)


def with_commit(program: Program, ownership: Ownership) -> Program:
    """Appends the end of the step: each worker reduces, commits and steps all its slots, in slot order."""
    return {
        worker: actions
        + tuple(
            Action(stage, op, pipeline=pipeline)
            for op in (Op.REDUCE_GRAD, Op.COMMIT, Op.STEP)
            for pipeline, stage in ownership.slots_of(worker)
        )
        for worker, actions in program.items()
    }


def to_csv(program: Program) -> str:
    """Returns the program as CSV: one row per worker in order, one action per cell, as torch's pipelining writes it."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for worker in sorted(program):
        writer.writerow([str(action) for action in program[worker]])
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
