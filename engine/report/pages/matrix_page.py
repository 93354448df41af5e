"""The page of a matrix: its grid, whose fields show their cells under the mouse, and a list of cells that did not pass.

Rules: the page opens without a network and holds no script. Every text from outside is escaped. A click on a field
keeps its cells visible, so that their text can be copied.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from importlib.resources import files
from string import Template

from engine.core.checks.cell_result import CellResult, counted
from engine.report.pages.cell_grid import LEGEND, CellGrid, GridCell, column_groups, letter_of

_MOST_TOLD = 12  # cells of one field
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$name: $counts</title>
<style>$css</style>
</head>
<body data-drawn="yes">
<header><p class="run">bamboo matrix <b>$name</b></p><h1 class="$mood">$counts</h1></header>
<main>
<section><div class="scroll">$grid</div>
<p class="note">$legend. Point at a field, or click on it, to see its cells.</p></section>
$others
</main>
</body>
</html>
""")

Replay = Callable[[str], str]  # the command that runs a cell again, by its name


def matrix_page(name: str, grid: CellGrid, results: Sequence[CellResult], replay: Replay) -> str:
    """Returns the page as HTML."""
    others = [each for each in results if each.result != "passed"]
    mood = "good" if results and not others else "bad" if any(each.result == "failed" for each in others) else "open"
    told = "".join(f"<li>{_told((each.cell, each), replay)}</li>" for each in others)
    return _PAGE.substitute(
        name=html.escape(name),
        counts=html.escape(counted(results)),
        mood=mood,
        css=files("engine.report.pages").joinpath("page.css").read_text(encoding="utf-8"),
        grid=_table(grid, replay),
        legend=LEGEND,
        others=f'<section><h2>Cells that did not pass</h2><ul class="others">{told}</ul></section>' if told else "",
    )


def _table(grid: CellGrid, replay: Replay) -> str:
    groups = column_groups(grid.columns)
    head = "".join(f'<th colspan="{len(stages)}">{html.escape(fault)}</th>' for fault, stages in groups)
    below = "".join(f"<th>{html.escape(stage)}</th>" for _, stages in groups for stage in stages)
    rows = []
    for row in grid.rows:
        fields = "".join(_field(grid.fields.get((row, column), ()), replay) for column in grid.columns)
        rows.append(f"<tr><th>{html.escape(row)}</th>{fields}</tr>")
    of_faults = "fault &rarr;" if any(fault for fault, _ in grid.columns) else ""
    of_stages = "stage &rarr;" if any(stage for _, stage in grid.columns) else ""
    of_rows = f"<span>{html.escape(grid.axis)} &darr;</span>"
    titles = (
        f'<thead><tr><th class="axis">{of_faults}</th>{head}</tr>'
        f'<tr><th class="axis">{of_rows} {of_stages}</th>{below}</tr></thead>'
    )
    return f'<table class="cells">{titles}<tbody>{"".join(rows)}</tbody></table>'


def _field(cells: Sequence[GridCell], replay: Replay) -> str:
    if not cells:
        return "<td></td>"
    letter = letter_of(cells[0][1])
    told = "".join(f"<p>{_told(cell, replay)}</p>" for cell in cells[:_MOST_TOLD])
    more = len(cells) - _MOST_TOLD
    rest = f"<p>and {more} more</p>" if more > 0 else ""
    kind = "none" if letter == "-" else letter
    return f'<td class="cell {kind}" tabindex="0">{letter}<div class="told">{told}{rest}</div></td>'


def _told(cell: GridCell, replay: Replay) -> str:
    """Returns the name of a cell, its result with the reason, and the command that runs it again."""
    name, result = cell
    if result is None:
        verdict = "not run"
    else:
        kind = f" ({result.failure})" if result.failure else ""
        why = f": {result.text}" if result.result != "passed" else ""
        verdict = f"{result.result}{kind} in {result.seconds:.1f} s{why}"
    return f"<b>{html.escape(name)}</b> {html.escape(verdict)}<br><code>{html.escape(replay(name))}</code>"
