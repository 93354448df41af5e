"""The grid of a matrix: actions down, stages and faults across; a letter in each field, and a colour beside it.

Rules: the letter says all, so that nothing is lost without colours: P passed, F failed, I invalid, - not run, and
nothing where there is no such cell. A field of several cells shows the worst of them.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.core.cell_result import CellResult

_LETTERS = {"failed": "F", "invalid": "I", "": "-", "passed": "P"}  # the worst first
_ANSI = {"F": "31", "I": "33", "-": "90", "P": "32"}
_CSS = {"F": "#b3261e", "I": "#8a5a00", "-": "#6b6b6b", "P": "#1b7f3b"}
LEGEND = "P passed  F failed  I invalid  - not run"

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Grid:
    """The fields of a grid: row and column names, and the letter of each (row, column) that has a cell."""

    rows: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    letters: Mapping[tuple[str, tuple[str, str]], str]


def grid_of(cells: Iterable[tuple[str, Labels]], results: Mapping[str, CellResult]) -> Grid:
    """Returns the grid of the cells, (name, labels), as far as there are `results` of them by name."""
    order = list(_LETTERS.values())
    letters: dict[tuple[str, tuple[str, str]], str] = {}
    for name, labels in cells:
        result = results.get(name)
        letter = _LETTERS[result.result if result else ""]
        field = (_row(name, labels), (labels.get("fault", labels.get("do", "")), labels.get("stage", "")))
        letters[field] = min(letter, letters.get(field, "P"), key=order.index)
    rows = tuple(dict.fromkeys(row for row, _ in letters))
    stages = {stage: number for number, (_, stage) in enumerate(dict.fromkeys(column for _, column in letters))}
    faults = {fault: number for number, fault in enumerate(dict.fromkeys(column[0] for _, column in letters))}
    columns = sorted({column for _, column in letters}, key=lambda each: (faults[each[0]], stages[each[1]]))
    return Grid(rows, tuple(columns), letters)


def _row(name: str, labels: Labels) -> str:
    return labels.get("action") or name.partition("/")[0]


def grid_text(grid: Grid, colours: bool) -> str:
    """Returns the grid for a terminal."""
    first = max((len(row) for row in grid.rows), default=0)
    groups = _groups(grid.columns)
    widths = [max(len(fault), 2 * len(stages)) + 2 for fault, stages in groups]
    head = "".join(fault.ljust(width) for (fault, _), width in zip(groups, widths, strict=True))
    below = "".join(
        "".join(f"{stage[:1] or ' '} " for stage in stages).ljust(width)
        for (_, stages), width in zip(groups, widths, strict=True)
    )
    lines = [f"{'':<{first}}  {head}".rstrip(), f"{'':<{first}}  {below}".rstrip()]
    for row in grid.rows:
        fields = []
        for (fault, stages), width in zip(groups, widths, strict=True):
            shown = "".join(f"{_shown(grid.letters.get((row, (fault, stage))), colours)} " for stage in stages)
            fields.append(shown + " " * (width - 2 * len(stages)))
        lines.append(f"{row:<{first}}  {''.join(fields)}".rstrip())
    return "\n".join([line for line in lines if line.strip()] + [LEGEND])


def _groups(columns: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Returns the stages of each fault."""
    groups: dict[str, list[str]] = {}
    for fault, stage in columns:
        groups.setdefault(fault, []).append(stage)
    return list(groups.items())


def _shown(letter: str | None, colours: bool) -> str:
    if letter is None:
        return " "
    return f"\x1b[{_ANSI[letter]}m{letter}\x1b[0m" if colours else letter


def grid_html(grid: Grid) -> str:
    """Returns the grid as a table, for a page."""
    groups = _groups(grid.columns)
    head = "".join(f'<th colspan="{len(stages)}">{html.escape(fault)}</th>' for fault, stages in groups)
    below = "".join(f"<th>{html.escape(stage)}</th>" for _, stages in groups for stage in stages)
    rows = []
    for row in grid.rows:
        fields = "".join(_field(grid.letters.get((row, column))) for column in grid.columns)
        rows.append(f"<tr><th>{html.escape(row)}</th>{fields}</tr>")
    table = f"<thead><tr><th></th>{head}</tr><tr><th></th>{below}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<table class="cells">{table}</table><p>{LEGEND}</p>'


def _field(letter: str | None) -> str:
    if letter is None:
        return "<td></td>"
    return f'<td style="background:{_CSS[letter]};color:#fff;text-align:center">{letter}</td>'
