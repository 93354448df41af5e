"""The grid of a matrix: a row per action, a column per fault and stage, and a coloured letter in each field.

Rules: the letters can be read without colours: P passed, F failed, I invalid, - not run; a field without a cell is
empty. A field of several cells shows the worst result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.core.checks.cell_result import CellResult

_LETTERS = {"failed": "F", "invalid": "I", "": "-", "passed": "P"}  # the worst first
LEGEND = "P passed  F failed  I invalid  - not run"

Labels = Mapping[str, str]
Column = tuple[str, str]  # fault and stage
GridCell = tuple[str, CellResult | None]  # its name and its result; None if it did not run


@dataclass(frozen=True, slots=True)
class CellGrid:
    """The fields of a grid: row and column names, and the cells of each (row, column), the worst result first.

    `axis` is the title of the rows.
    """

    axis: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    fields: Mapping[tuple[str, Column], tuple[GridCell, ...]]

    def letter(self, row: str, column: Column) -> str | None:
        """Returns the letter of a field, or None if it has no cell."""
        cells = self.fields.get((row, column))
        return letter_of(cells[0][1]) if cells else None


def grid_of(cells: Iterable[tuple[str, Labels]], results: Mapping[str, CellResult]) -> CellGrid:
    """Returns the grid of the cells (name, labels); `results` maps the names of the cells that ran to their results."""
    order = list(_LETTERS.values())
    fields: dict[tuple[str, Column], list[GridCell]] = {}
    axes: set[str] = set()
    for name, labels in cells:
        axes.add("action" if labels.get("action") else "case")
        column = (labels.get("fault", labels.get("do", "")), labels.get("stage", ""))
        fields.setdefault((_row(name, labels), column), []).append((name, results.get(name)))
    rows = tuple(dict.fromkeys(row for row, _ in fields))
    stages = _in_order([[stage for row, (_, stage) in fields if row == each] for each in rows])
    faults = {fault: number for number, fault in enumerate(dict.fromkeys(column[0] for _, column in fields))}
    columns = sorted({column for _, column in fields}, key=lambda each: (faults[each[0]], stages[each[1]]))
    worst_first = {
        field: tuple(sorted(found, key=lambda cell: order.index(letter_of(cell[1])))) for field, found in fields.items()
    }
    return CellGrid(" or ".join(sorted(axes)), rows, tuple(columns), worst_first)


def _in_order(stages: Iterable[Sequence[str]]) -> dict[str, int]:
    """Returns the place of each stage; rows with more stages decide first, because not every action has all stages."""
    longest_first = sorted(stages, key=lambda each: len(set(each)), reverse=True)
    return {stage: place for place, stage in enumerate(dict.fromkeys(chain.from_iterable(longest_first)))}


def letter_of(result: CellResult | None) -> str:
    """Returns the letter of one cell."""
    return _LETTERS[result.result if result else ""]


def _row(name: str, labels: Labels) -> str:
    return labels.get("action") or name.partition("/")[0]


def grid_parts(grid: CellGrid, width: int | None = None) -> list[tuple[str, str]]:
    """Returns the grid for a terminal of `width` columns, or for any width; faults without room stand below.

    Each part has its text and a letter, which is the text of a field, and empty for other texts.
    """
    first = max((len(row) for row in grid.rows), default=0)
    blocks: list[list[tuple[str, list[str]]]] = [[]]
    for group in column_groups(grid.columns):
        if blocks[-1] and width is not None and first + sum(map(_width, [*blocks[-1], group])) > width:
            blocks.append([])
        blocks[-1].append(group)
    lines = [line for block in blocks for line in (*_block_lines(grid, block, first), "")][:-1]
    return [part for line in lines for part in _parts(line, first)] + [(LEGEND, "")]


def _parts(line: str, first: int) -> Iterator[tuple[str, str]]:
    """Yields the parts of a line; the lines of rows begin with a name in `first` columns."""
    yield line[:first], ""
    for each in line[first:]:
        yield each, each if line[:first].strip() and not each.isspace() else ""
    yield "\n", ""


def _width(group: tuple[str, list[str]]) -> int:
    fault, stages = group
    return max(len(fault), 2 * len(stages)) + 2


def _block_lines(grid: CellGrid, groups: Sequence[tuple[str, list[str]]], first: int) -> list[str]:
    """Returns the lines of some faults, each row with its name in `first` columns."""
    widths = [_width(group) for group in groups]
    head = "".join(fault.ljust(width) for (fault, _), width in zip(groups, widths, strict=True))
    below = "".join(
        "".join(f"{stage[:1] or ' '} " for stage in stages).ljust(width)
        for (_, stages), width in zip(groups, widths, strict=True)
    )
    lines = [f"{'':<{first}}  {head}".rstrip(), f"{'':<{first}}  {below}".rstrip()]
    for row in grid.rows:
        fields = []
        for (fault, stages), width in zip(groups, widths, strict=True):
            shown = "".join(f"{grid.letter(row, (fault, stage)) or ' '} " for stage in stages)
            fields.append(shown + " " * (width - 2 * len(stages)))
        lines.append(f"{row:<{first}}  {''.join(fields)}".rstrip())
    return [line for line in lines if line.strip()]


def column_groups(columns: Sequence[Column]) -> list[tuple[str, list[str]]]:
    """Returns (fault, its stages) in the order of the columns."""
    groups: dict[str, list[str]] = {}
    for fault, stage in columns:
        groups.setdefault(fault, []).append(stage)
    return list(groups.items())
