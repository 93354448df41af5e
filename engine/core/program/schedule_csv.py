"""Compute lists as CSV in the format of torch's pipelining; the placement that a schedule was made for."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from itertools import pairwise

from engine.core.action import COMPUTE_OPS, Action, Op, parse_action
from engine.core.errors import ScheduleError
from engine.core.ownership import Placement, PlacementChoice, worker_of
from engine.core.program.schedules import OVERLAPS, SCHEDULES, ComputeLists, IsPair, overlap_of

# Compute lists as CSV in the format of torch's pipelining: row n is worker n, a cell is an action.
#
# Rules for reading: an empty cell is an idle step and is skipped. An overlap pair is read as its two actions in a row.
# A reduction is skipped, because a pass adds it. A transfer is refused. An error names worker and position: the numbers
# of row and cell, from 0. The forwards of each stage keep their places, but get microbatches in ascending order; so do
# the backwards. The result of training therefore does not depend on the schedule. `verify` checks that the lists can
# run.

_TAKEN = (COMPUTE_OPS - {Op.REDO_F}) | {Op.REDUCE_GRAD}


def is_text(schedule: str) -> bool:
    """Returns whether a schedule is CSV text; else it is a name."""
    return "," in schedule or "\n" in schedule


def name_of(schedule: str) -> str:
    """Returns the name of a schedule for messages."""
    return "a schedule of one's own" if is_text(schedule) else schedule


def rows_to_csv(rows: Iterable[Sequence[Action]], is_pair: IsPair | None = None) -> str:
    """Returns actions as CSV; the two actions of a pair share a cell."""
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        _cells(row, is_pair) if is_pair else [str(action) for action in row] for row in rows
    )
    return text.getvalue()


def placed_rows(text: str) -> list[list[tuple[int, Action]]]:
    """Returns the actions of each row with their positions; raises ScheduleError with worker and position."""
    rows: list[list[tuple[int, Action]]] = []
    try:
        for worker, row in enumerate(csv.reader(StringIO(text))):
            rows.append(list(_parse_row(worker, row)))
    except csv.Error as error:
        raise ScheduleError(f"worker {len(rows)}: expected actions as CSV: {error}") from error
    return rows


def lists_from_csv(text: str) -> ComputeLists:
    """Returns the compute lists that `text` holds, microbatches in order; raises ScheduleError."""
    rows = placed_rows(text)
    for worker, row in enumerate(rows):
        for position, action in row:
            if action.op not in _TAKEN or action.pipeline:
                expected = "F, B, I and W of one pipeline: transfers and the end of a step are added to a schedule"
                text = f"expected {expected}, found {action}; bamboo schedule export --compute-only leaves them out"
                raise ScheduleError(f"worker {worker}, position {position}: {text}")
    return tuple(
        _in_order(_with_parts(tuple(action for _, action in row if action.op is not Op.REDUCE_GRAD))) for row in rows
    )


def _with_parts(row: tuple[Action, ...]) -> tuple[Action, ...]:
    """Returns a row in which B beside W of the same microbatch is I, as older versions of torch wrote it."""
    in_parts = {(action.stage, action.microbatch) for action in row if action.op is Op.W}
    return tuple(
        action._replace(op=Op.I) if action.op is Op.B and (action.stage, action.microbatch) in in_parts else action
        for action in row
    )


def cell_of(text: str, worker: int, action: Action, nth: int) -> int:
    """Returns the position of the cell with a worker's nth `action`, from 0; -1 if it has none, like a SEND."""
    cells = [cell for cell, each in placed_rows(text)[worker] if each.op is not Op.REDUCE_GRAD]
    places = [cell for cell, each in zip(cells, lists_from_csv(text)[worker], strict=True) if each == action]
    return places[nth] if nth < len(places) else -1


def named_pairs(text: str) -> Iterator[tuple[int, int, Action, Action]]:
    """Yields worker, position and the two actions of each overlap pair in compute lists as CSV."""
    for worker, (row, line) in enumerate(zip(placed_rows(text), lists_from_csv(text), strict=True)):
        cells = [cell for cell, each in row if each.op is not Op.REDUCE_GRAD]
        for place, (first, second) in enumerate(pairwise(line)):
            if cells[place] == cells[place + 1]:
                yield worker, cells[place], first, second


def stages_on(lists: ComputeLists) -> dict[int, int]:
    """Returns the worker of each stage, as stage -> worker; raises ScheduleError if a stage is on two workers."""
    workers: dict[int, int] = {}
    for worker, row in enumerate(lists):
        for stage in sorted({action.stage for action in row}):
            if workers.setdefault(stage, worker) != worker:
                raise ScheduleError(f"worker {worker}: stage {stage} is on worker {workers[stage]} too")
    return workers


def _in_order(row: tuple[Action, ...]) -> tuple[Action, ...]:
    """Sorts the microbatches of each stage's forwards and of its backwards (B and I); W takes the order of I."""
    queues: dict[tuple[int, Op], list[int]] = {}
    line = [(each, (each.stage, Op.B if each.op is Op.I else each.op)) for each in row]
    for action, key in line:
        if action.op is not Op.W:
            queues.setdefault(key, []).append(action.microbatch)
    # A list that repeats a microbatch cannot run. It stays as it is, so that `verify` reports its true position.
    rest = {key: iter(sorted(each) if len(set(each)) == len(each) else each) for key, each in queues.items()}
    in_parts: dict[int, list[int]] = {}
    ordered = []
    for action, key in line:
        microbatch = action.microbatch
        if action.op is not Op.W:
            microbatch = next(rest[key])
            if action.op is Op.I:
                in_parts.setdefault(action.stage, []).append(microbatch)
        ordered.append(action._replace(microbatch=microbatch))
    weights = {stage: iter(microbatches) for stage, microbatches in in_parts.items()}
    return tuple(
        action._replace(microbatch=next(weights.get(action.stage, iter(())), action.microbatch))
        if action.op is Op.W
        else action
        for action in ordered
    )


def _parse_row(worker: int, row: Sequence[str]) -> Iterator[tuple[int, Action]]:
    for position, cell in enumerate(row):
        try:
            yield from ((position, action) for action in _actions_in(cell.strip()))
        except ScheduleError as error:
            raise ScheduleError(f"worker {worker}, position {position}: {error}") from error


def _cells(row: Sequence[Action], is_pair: IsPair) -> list[str]:
    cells: list[str] = []
    first: Action | None = None  # what may begin a pair
    for action in row:
        if first is not None and is_pair(first, action):
            cells[-1] = f"({cells[-1]};{action}){overlap_of(first, action)}"
            first = None
        else:
            cells.append(str(action))
            first = action
    return cells


def _actions_in(cell: str) -> list[Action]:
    """Returns the actions of a cell: none, one, or the two of a pair such as (2F0;1B3)OVERLAP_F_B."""
    texts, end, kind = cell.removeprefix("(").partition(")")
    if not (cell.startswith("(") and end and kind in OVERLAPS.values()):
        return [parse_action(cell)] if cell else []
    pair = [parse_action(each) for each in texts.split(";")]
    if len(pair) != 2 or OVERLAPS.get((pair[0].op, pair[1].op)) != kind:
        raise ScheduleError(f"expected two actions with the ops of {kind}, in its order, found {cell}")
    return pair


# The placement of a schedule: the user's choice, or by default the one that the schedule was made for.
_PLACEMENTS: tuple[Placement, ...] = ("loop", "v")


def placement_of(schedule: str, choice: PlacementChoice) -> Placement:
    """Returns the placement of a schedule, given by name or as CSV."""
    if choice != "auto":
        return choice
    if is_text(schedule):
        lists = lists_from_csv(schedule)
        return next((each for each in _PLACEMENTS if has_placement(lists, each)), "loop")
    return SCHEDULES[schedule].placement


def has_placement(lists: ComputeLists, placement: Placement) -> bool:
    """Returns whether compute lists have each stage on the worker that a placement gives it."""
    stages = stages_on(lists)
    return all(worker_of(stage, len(lists), placement) == worker for stage, worker in stages.items())
