"""The page of a matrix: its grid, the cells of one field beside it, times by fault, and the cells that did not pass.

Rules: the page opens without a network; its one script shows the cells of the field under the mouse. A click on a
field keeps its cells, so that their text can be copied. Every text from outside is escaped.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from string import Template

import pandas as pd

from engine.core.checks.cell_result import CellResult, counts_text
from engine.report.pages.cell_grid import LEGEND, CellGrid, GridCell, column_groups, letter_of
from engine.report.pages.frame import Tile, asset, facts_html, html_table, policy, tiles_html

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
    told = "".join(f"<li>{_told((each.cell, each), run)}</li>" for each in shown)
    heading = (
        "Cells that did not pass" if shown == others else "Cells that did not pass, or whose workers raised exceptions"
    )
    script = asset("matrix.js")
    return Template(asset("matrix.html")).substitute(
        policy=policy(script),
        name=html.escape(name),
        when=html.escape(run.when),
        counts=html.escape(counts_text(results) + missing),
        mood=mood,
        facts=facts_html(run.facts),
        tiles=tiles_html(_tiles(grid, results)),
        css=asset("page.css"),
        grid=_table(grid, run),
        legend=LEGEND.replace("  ", ", "),
        times=html_table(_times(results)),
        others=f'<section><h2>{heading}</h2><ul class="others">{told}</ul></section>' if told else "",
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
    found = [each for each in results if each.stall_ms is not None]
    if not found:
        return "", ""
    at_least = "\u2265 " if any(each.stall_bound for each in found) else ""
    times_ms = [each.stall_ms or 0.0 for each in found]
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


def _table(grid: CellGrid, run: MatrixRunFacts) -> str:
    groups = column_groups(grid.columns)
    head = "".join(f'<th colspan="{len(stages)}">{html.escape(fault)}</th>' for fault, stages in groups)
    below = "".join(f"<th>{html.escape(stage)}</th>" for _, stages in groups for stage in stages)
    rows = []
    for row in grid.rows:
        fields = "".join(_field(grid.fields.get((row, column), ()), run) for column in grid.columns)
        rows.append(f"<tr><th>{html.escape(row)}</th>{fields}</tr>")
    of_faults = "fault &rarr;" if any(fault for fault, _ in grid.columns) else ""
    of_stages = "stage &rarr;" if any(stage for _, stage in grid.columns) else ""
    of_rows = f"<span>{html.escape(grid.axis)} &darr;</span>"
    titles = (
        f'<thead><tr><th class="axis">{of_faults}</th>{head}</tr>'
        f'<tr><th class="axis">{of_rows} {of_stages}</th>{below}</tr></thead>'
    )
    return f'<table class="cells">{titles}<tbody>{"".join(rows)}</tbody></table>'


def _field(cells: Sequence[GridCell], run: MatrixRunFacts) -> str:
    """Returns a field: its letter, the number of its cells with that result, and of all its cells if these differ."""
    if not cells:
        return '<td class="blank"></td>'
    letters = [letter_of(result) for _, result in cells]
    worst = letters[0]
    alike = letters.count(worst)
    number = str(alike) if alike == len(cells) else f"{alike}/{len(cells)}"
    told = "".join(f"<p>{_told(cell, run)}</p>" for cell in cells[:_MOST_TOLD])
    more = len(cells) - _MOST_TOLD
    rest = f"<p>and {more} more</p>" if more > 0 else ""
    kind = "none" if worst == "-" else worst
    return (
        f'<td class="cell {kind}" tabindex="0">{worst}<small>{number}</small><div class="told">{told}{rest}</div></td>'
    )


def _told(cell: GridCell, run: MatrixRunFacts) -> str:
    """Returns the name of a cell, its result with the reason, its times, and the command that runs it again."""
    name, result = cell
    if result is None:
        verdict = "not run"
    else:
        why = f": {result.text}" if result.result != "passed" else ""
        bound = f"{result.stall_bound} " if result.stall_bound else ""
        stall = "" if result.stall_ms is None else f", training stalled for {bound}{result.stall_ms:,.0f} ms"
        verdict = f"{result.verdict} in {result.seconds:.1f} s{stall}{why}"
    page = f' <a href="{html.escape(run.pages[name])}">its run</a>' if name in run.pages else ""
    raised = "".join(f'<br><span class="bad">{html.escape(each)}</span>' for each in (result.raised if result else ()))
    again = html.escape(run.replay(name))
    return f"<b>{html.escape(name)}</b> {html.escape(verdict)}{page}{raised}<br><code>{again}</code>"
