"""One self-contained page about a run: it opens without a network, and says in its first line what happened.

Rules: every text from outside is escaped, for HTML, for scripts and for plotly. The page's policy lets no other script
run than the two that are here named by their hashes, and lets none of them ask anything of any network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from string import Template
from typing import Any

import pandas as pd
from plotly.offline import get_plotlyjs

from engine.report.charts import KIND_COLOURS, PHASE_COLOURS, charts
from engine.report.formats import cell_text
from engine.report.headline import command, headline
from engine.report.load import RunTables
from engine.report.recovery import PHASE_COLUMNS
from engine.report.timeline import timeline

_RECOVERY_COLUMNS = {
    "what": "what",
    "slots": "slot",
    "step": "step",
    "last_action": "last action",
    "heirs": "heir",
    **{column: column.removesuffix("_ms") for column in PHASE_COLUMNS},
    "pause_ms": "pause",
    "total_ms": "to commit",
    "redone_actions": "redone",
    "samples_redone": "samples redone",
    "samples_per_s_before": "samples/s before",
    "samples_per_s_during": "during",
    "samples_per_s_after": "after",
    "rung": "state from",
    "reason": "reason",
}
_TEXT_COLUMNS = {"what", "text", "reason"}


def page(run: RunTables) -> str:
    """Returns the page as HTML."""
    mood, sentence = headline(run)
    drawn, shown = timeline(run), charts(run)
    left_out = drawn["left_out"]
    data = {"timeline": drawn, "charts": shown, "colours": KIND_COLOURS, "phase_colours": PHASE_COLOURS}
    plotly, script = get_plotlyjs(), _asset("timeline.js") + _asset("page.js")
    history = run.history.rename(columns={"at_ms": "at, ms"})
    workers = run.workers.rename(columns={"end_ms": "end, ms", "peak_memory_mib": "peak MiB", "busy_ms": "busy, ms"})
    return Template(_asset("page.html")).substitute(
        policy=_policy(plotly, script),
        title=html.escape(f"{run.name}: {sentence}"),
        css=_asset("page.css"),
        name=html.escape(run.name),
        mood=mood,
        headline=re.sub(r"(\d) (ms|s)\b", r"\1&nbsp;\2", html.escape(sentence)),
        tiles=_tiles(run),
        left_out=f"{left_out:,} actions of other steps are not in this page." if left_out else "",
        recovery=_recovery(run),
        exposure=html.escape(_exposed(run)),
        memory='<section><h2>Memory</h2><div id="memory" class="chart"></div></section>' if "memory" in shown else "",
        history=_table(history),
        workers=_table(workers),
        command=html.escape(command(run)),
        data=_for_script(data),
        plotly=plotly,
        script=script,
    )


def _asset(name: str) -> str:
    return files("engine.report").joinpath(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    hashes = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _for_script(data: Any) -> str:
    """Returns JSON that cannot end the element it stands in; what is not a number is null."""
    return json.dumps(_finite(data), separators=(",", ":")).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _tiles(run: RunTables) -> str:
    pause, steps = run.recovery["pause_ms"], run.steps
    tiles = [("steps committed", f"{steps['step'].nunique()}", f"of {run.job.get('steps', '?')}")]
    if len(run.recovery):
        tiles.append(("recoveries", str((run.recovery["outcome"] == "recovered").sum()), f"of {len(run.recovery)}"))
        tiles.append(("median pause", _figure(pause.median()), "ms"))
    tiles.append(("median step", _figure(steps["duration_ms"].median()), "ms"))
    tiles.append(("throughput", _figure(steps["samples_per_s"].median()), "samples/s"))
    tiles.append(("training loss", f"{steps['loss'].iloc[-1]:.4g}" if len(steps) else "-", ""))
    return "".join(
        f"<div><dt>{name}</dt><dd>{html.escape(value)} <small>{html.escape(unit)}</small></dd></div>"
        for name, value, unit in tiles
    )


def _figure(value: float) -> str:
    if pd.isna(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _recovery(run: RunTables) -> str:
    if run.recovery.empty:
        return ""
    # An error may name many files; all of it stands in the history.
    table = run.recovery.assign(reason=run.recovery["reason"].str.split(";").str[0])
    table = table[list(_RECOVERY_COLUMNS)].rename(columns=_RECOVERY_COLUMNS)
    heading = "<h2>Where the time went <small>(ms; click merged or heal to see what follows the pause)</small></h2>"
    chart = '<div id="phases" class="chart"></div>'
    return f'<section>{heading}{chart}<div class="scroll tight">{_table(table)}</div></section>'


def _exposed(run: RunTables) -> str:
    lengths_ms = run.exposure["to_ms"] - run.exposure["from_ms"]
    exposed_ms, longest_ms = float(lengths_ms.sum()), float(lengths_ms.max())
    if not exposed_ms:
        return "Every slot had a live replica all the time."
    share = exposed_ms / run.end_ms if run.end_ms else 1.0
    said = f"Some slot had no other replica for {exposed_ms:,.0f} ms, {share:.1%} of the run"
    return f"{said}; the longest time was {longest_ms:,.0f} ms."


def _table(table: pd.DataFrame) -> str:
    """Returns a table as HTML, every cell escaped."""
    numeric = [pd.api.types.is_numeric_dtype(dtype) for dtype in table.dtypes]
    head = "".join(
        f'<th class="{"number" if number else ""}">{html.escape(str(name))}</th>'
        for name, number in zip(table.columns, numeric, strict=True)
    )
    rows = []
    for values in table.itertuples(index=False, name=None):
        cells = []
        for name, value, number in zip(table.columns, values, numeric, strict=True):
            kind = "number" if number else "text" if name in _TEXT_COLUMNS else ""
            cells.append(f'<td class="{kind}">{html.escape(cell_text(value))}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
