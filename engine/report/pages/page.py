"""The page of a run; its heading states the outcome.

Rule: every text from outside is escaped, for HTML and for plotly; `frame` escapes the data of the scripts.
"""

from __future__ import annotations

import html
from string import Template

import pandas as pd

from engine.core.checks.stall import quantile
from engine.report.headline import command, headline
from engine.report.load import RunTables
from engine.report.pages.charts import KIND_COLOURS, PHASE_COLOURS, charts
from engine.report.pages.frame import Heading, Tile, asset, framed, html_table
from engine.report.pages.job_facts import host_line, job_line, when_text
from engine.report.pages.timeline import timeline
from engine.report.recovery import NO_WORKER_LOST, PHASE_COLUMNS, stalls_of

_RECOVERY_COLUMNS = {
    "what": "what",
    "outcome": "outcome",
    "slots": "slot",
    "step": "step",
    "last_action": "last action",
    "heirs": "heir",
    "stall_ms": "training stalled",
    "stall_bound": "bound",
    **{column: column.removesuffix("_ms") for column in PHASE_COLUMNS},
    "pause_ms": "pause",
    "redone_actions": "redone",
    "samples_redone": "samples redone",
    "samples_per_s_before": "samples/s before",
    "samples_per_s_during": "during",
    "samples_per_s_after": "after",
    "plan_bytes": "bytes sent",
    "heal_bytes": "to heal",
    "rung": "survived by",
    "reason": "reason",
}


def page(run: RunTables) -> str:
    """Returns the page as HTML."""
    mood, sentence = headline(run)
    drawn, shown = timeline(run), charts(run)
    left_out = drawn["left_out"]
    data = {"timeline": drawn, "charts": shown, "colours": KIND_COLOURS, "phase_colours": PHASE_COLOURS}
    history = run.history.rename(columns={"at_ms": "at, ms"})
    workers = run.workers.rename(columns={"end_ms": "end, ms", "peak_memory_mib": "peak MiB", "busy_ms": "busy, ms"})
    sections = Template(asset("run.html")).substitute(
        recovery=_recovery(run),
        exposure=html.escape(_exposed(run)),
        memory='<section><h2>Memory</h2><div id="memory" class="chart"></div></section>' if "memory" in shown else "",
        history=html_table(history),
        workers=html_table(workers),
        command=html.escape(command(run)),
    )
    note = f"{left_out:,} actions of other steps are not in this page." if left_out else ""
    when = when_text(run.host) if run.host else ""
    facts = [job_line(run.job), *([host_line(run.host)] if run.host else [])]
    heading = Heading("bamboo report", run.name, mood, sentence, _tiles(run), note, when, facts)
    return framed(heading, sections, data)


def _tiles(run: RunTables) -> list[Tile]:
    stalls, steps = stalls_of(run.recovery), run.steps
    tiles = [("steps committed", f"{steps['step'].nunique()}", f"of {run.job.steps}")]
    outcomes = run.recovery["outcome"][~run.recovery["outcome"].isin(NO_WORKER_LOST)]
    if len(outcomes):
        tiles.append(("recoveries", str((outcomes == "recovered").sum()), f"of {len(outcomes)}"))
        tiles.append(("training stalled", str(quantile(stalls, 0.5)) if stalls else "-", "in the median"))
    tiles.append(("median step", _figure(steps["duration_ms"].median()), "ms"))
    tiles.append(("throughput", _figure(steps["samples_per_s"].median()), "samples/s"))
    tiles.append(("training loss", f"{steps['loss'].iloc[-1]:.4g}" if len(steps) else "-", ""))
    return tiles


def _figure(value: float) -> str:
    if pd.isna(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _recovery(run: RunTables) -> str:
    if run.recovery.empty:
        return ""
    # An error may name many files; the history shows it completely.
    table = run.recovery.assign(reason=run.recovery["reason"].str.split(";").str[0])
    table = table[list(_RECOVERY_COLUMNS)].rename(columns=_RECOVERY_COLUMNS)
    if run.recovery["outcome"].isin(NO_WORKER_LOST).all():
        heading, chart = "<h2>Faults</h2>", ""
    else:
        heading = "<h2>Recoveries <small>(ms; click merged or heal to see the time after the pause)</small></h2>"
        chart = '<div id="phases" class="chart"></div>'
    return f'<section>{heading}{chart}<div class="scroll tight">{html_table(table)}</div></section>'


def _exposed(run: RunTables) -> str:
    lengths_ms = run.exposure["to_ms"] - run.exposure["from_ms"]
    exposed_ms, longest_ms = float(lengths_ms.sum()), float(lengths_ms.max())
    if not exposed_ms:
        return "Every slot had a live replica all the time."
    share = exposed_ms / run.end_ms if run.end_ms else 1.0
    total = f"Some slot had only its owner's replica for {exposed_ms:,.0f} ms, {share:.1%} of the run"
    return f"{total}; the longest time was {longest_ms:,.0f} ms."
