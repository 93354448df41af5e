"""The page of a matrix: its grid, the cells of one field with it, times by fault, and the cells that did not pass.

Rules: the page opens without a network; its one script shows the cells of the field under the mouse. A click on a
field keeps its cells, so that their text can be copied. The template escapes every text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

import pandas as pd

from engine.core.checks.cell_result import CellResult, counts_text
from engine.report.pages.frame import Heading, Tile, asset, rendered, table_of

# The grid of a matrix: a row per action, a column per fault and stage, and a coloured letter in each field.
#
# Rules: the letters can be read without colours: P passed, F failed, I invalid, - not run; a field without a cell is
# empty. A field of several cells shows the worst result.


_LETTERS = {"failed": "F", "invalid": "I", "": "-", "passed": "P"}  # the worst first
LEGEND = "P passed  F failed  I invalid  - not run"

Labels = Mapping[str, str]
Column = tuple[str, str]  # fault and stage
GridCell = tuple[str, CellResult | None]  # its name and its result; None if it did not run


@dataclass(frozen=True, slots=True)
class CellGrid:
    """A grid's names of rows and columns, the title of its rows, and the cells of each field, the worst first."""

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
    columns = sorted({column for _, column in fields}, key=lambda pair: (faults[pair[0]], stages[pair[1]]))
    worst_first = {
        field: tuple(sorted(group, key=lambda cell: order.index(letter_of(cell[1])))) for field, group in fields.items()
    }
    return CellGrid(" or ".join(sorted(axes)), rows, tuple(columns), worst_first)


def _in_order(stages: Iterable[Sequence[str]]) -> dict[str, int]:
    """Returns the place of each stage; rows with more stages decide first, because not every action has all stages."""
    longest_first = sorted(stages, key=lambda row: len(set(row)), reverse=True)
    return {stage: place for place, stage in enumerate(dict.fromkeys(chain.from_iterable(longest_first)))}


def letter_of(result: CellResult | None) -> str:
    """Returns the letter of one cell."""
    return _LETTERS[result.result if result else ""]


def _row(name: str, labels: Labels) -> str:
    return labels.get("action") or name.partition("/")[0]


def grid_parts(grid: CellGrid, width: int | None = None) -> list[tuple[str, str]]:
    """Returns the grid for a terminal of `width`, as texts with the letter of their field; other faults below."""
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


_MOST_TOLD = 12  # cells of one field

Replay = Callable[[str], str]  # the command that runs a cell again, by its name


@dataclass(frozen=True, slots=True)
class MatrixRunFacts:
    """The facts of a run of a matrix: when it ran, lines on its jobs and machine, and the page of each kept run.

    `pages` has the address of a run's page, relative to the page of the matrix, by the name of its cell. `num_missing`
    is the number of chosen cells that an interrupted matrix did not run.
    """

    when: str
    facts: Sequence[str]
    replay: Replay
    pages: dict[str, str]
    num_missing: int = 0


def matrix_page(name: str, grid: CellGrid, results: Sequence[CellResult], run: MatrixRunFacts) -> str:
    """Returns the page as HTML."""
    others = [each for each in results if each.result != "passed"]
    is_good = results and not others and not run.num_missing
    mood = "good" if is_good else "bad" if any(each.result == "failed" for each in others) else "open"
    missing = f"; interrupted before {run.num_missing} more" if run.num_missing else ""
    shown = [each for each in results if each.result != "passed" or each.raised]
    counts, script = counts_text(results) + missing, asset("matrix.js")
    return rendered(
        "matrix.html",
        Heading("bamboo matrix", name, mood, counts, _tiles(grid, results), run.when, run.facts),
        (script,),
        axis=grid.axis,
        has_faults=any(fault for fault, _ in grid.columns),
        has_stages=any(stage for _, stage in grid.columns),
        groups=column_groups(grid.columns),
        rows=[(row, [_field(grid.fields.get((row, each), ()), run) for each in grid.columns]) for row in grid.rows],
        legend=LEGEND.replace("  ", ", "),
        others=[_cell((each.cell, each), run) for each in shown],
        has_passed=shown != others,
        times=table_of(_times(results)),
        script=script,
    )


def _tiles(grid: CellGrid, results: Sequence[CellResult]) -> list[Tile]:
    counts = Counter(each.result for each in results)
    num_cells = sum(map(len, grid.fields.values()))
    middle, longest = _stalls(results)
    tiles = [
        ("passed", str(counts["passed"]), f"of {num_cells} cells"),
        ("failed", str(counts["failed"]), ""),
        ("invalid", str(counts["invalid"]), ""),
        ("not run", str(num_cells - len(results)), ""),
        ("time of all cases", f"{sum(each.seconds for each in results):,.0f}", "s"),
    ]
    if middle:
        tiles += [("training stalled, median", middle, "ms"), ("training stalled, longest", longest, "ms")]
    return tiles


def _stalls(results: Sequence[CellResult]) -> tuple[str, str]:
    """Returns the median and the longest of the times that training stalled, in milliseconds; empty without any."""
    stalled = [each for each in results if each.stall_ms is not None]
    if not stalled:
        return "", ""
    at_least = "\u2265 " if any(each.stall_bound for each in stalled) else ""
    times_ms = [each.stall_ms or 0.0 for each in stalled]
    return f"{at_least}{median(times_ms):,.0f}", f"{at_least}{max(times_ms):,.0f}"


def _times(results: Sequence[CellResult]) -> pd.DataFrame:
    """Returns the number of cells and their times by fault."""
    by_fault: dict[str, list[CellResult]] = {}
    for each in results:
        by_fault.setdefault(each.labels.get("fault", each.do) or "none", []).append(each)
    rows = []
    for fault, cells in by_fault.items():
        middle, longest = _stalls(cells)
        rows.append(
            {
                "fault": fault,
                "cells": len(cells),
                "passed": sum(each.result == "passed" for each in cells),
                "time of a case, s": median(each.seconds for each in cells),
                "training stalled, ms (median)": middle,
                "training stalled, ms (longest)": longest,
            }
        )
    return pd.DataFrame(rows)


def _field(cells: Sequence[GridCell], run: MatrixRunFacts) -> dict[str, Any] | None:
    """Returns a field: its letter, the number of its cells with that result, and of all its cells if these differ."""
    if not cells:
        return None
    letters = [letter_of(result) for _, result in cells]
    worst = letters[0]
    alike = letters.count(worst)
    return {
        "kind": "none" if worst == "-" else worst,
        "letter": worst,
        "number": str(alike) if alike == len(cells) else f"{alike}/{len(cells)}",
        "cells": [_cell(cell, run) for cell in cells[:_MOST_TOLD]],
        "more": max(0, len(cells) - _MOST_TOLD),
    }


def _cell(cell: GridCell, run: MatrixRunFacts) -> dict[str, Any]:
    """Returns the name of a cell, its result with the reason, its times, and the command that runs it again."""
    name, result = cell
    verdict = "not run"
    if result is not None:
        why = f": {result.text}" if result.result != "passed" else ""
        bound = f"{result.stall_bound} " if result.stall_bound else ""
        stall = "" if result.stall_ms is None else f", training stalled for {bound}{result.stall_ms:,.0f} ms"
        verdict = f"{result.verdict} in {result.seconds:.1f} s{stall}{why}"
    raised = result.raised if result else ()
    return {
        **{"name": name, "verdict": verdict, "raised": raised},
        **{"page": run.pages.get(name), "replay": run.replay(name)},
    }
