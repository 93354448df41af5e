"""Text grids with a row per worker: of a dry run, a cell per unit of time; of a broken program, a cell per action."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from engine.core.action import COMPUTE_OPS, Action
from engine.core.ownership import Ownership
from engine.core.program.dry_run import DryRun


def grid_lines(run: DryRun, width: int = 0, ownership: Ownership | None = None) -> list[str]:
    """Returns the compute actions of `run`, which has integer costs, in blocks of at most `width` columns (0: any).

    A cell shows an action at the unit of its start, `-` while it goes on, and blank while the worker waits. Actions of
    a worker on a slot that it does not own by `ownership` stand in brackets.
    """
    num_units = round(run.makespan)
    workers = sorted({span.worker for span in run.spans})
    cells = {worker: [""] * num_units for worker in workers}
    for span in run.spans:
        if span.action.op in COMPUTE_OPS:
            first, last = round(span.start), round(span.end)
            owned = ownership is None or ownership.owner(span.action.pipeline, span.action.stage) == span.worker
            text = str(span.action) if owned else f"({span.action})"
            cells[span.worker][first:last] = [text, *["-"] * (last - first - 1)]
    cell_width = max((len(cell) for row in cells.values() for cell in row), default=1) + 1
    label_width = len("worker ") + max(len(str(worker)) for worker in workers)
    units_per_block = max(1, (width - label_width - 2) // cell_width) if width else num_units
    lines: list[str] = []
    for first in range(0, num_units, units_per_block):
        if first:
            lines.append("")
        for worker in workers:
            block = cells[worker][first : first + units_per_block]
            row = "".join(f"{cell:<{cell_width}}" for cell in block)
            lines.append(f"{'worker ' + str(worker):<{label_width}}  {row}".rstrip())
    return lines


_BEFORE_THE_FIRST = 3  # columns


def marked_lines(
    program: Mapping[int, tuple[Action, ...]], marked: Collection[tuple[int, int]], width: int
) -> list[str]:
    """Returns rows of a program, at most `width` columns wide, that begin shortly before the first marked action.

    `marked` has at least one (worker, position); these actions stand between > and <.
    """
    start = max(0, min(position for _, position in marked) - _BEFORE_THE_FIRST)
    rows = {
        f"worker {worker}": [
            f">{action}<" if (worker, start + place) in marked else str(action)
            for place, action in enumerate(actions[start : start + width])
        ]
        for worker, actions in program.items()
    }
    label_width = max(map(len, rows)) + 2
    cell_width = max(len(cell) for row in rows.values() for cell in row) + 1
    columns = max(1, (width - label_width) // cell_width)
    return [
        f"{label:<{label_width}}{''.join(f'{cell:<{cell_width}}' for cell in row[:columns])}".rstrip()
        for label, row in rows.items()
    ]
