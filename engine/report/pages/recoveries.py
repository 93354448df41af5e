"""The section of a run's page about its recoveries: the costs in a table, and the rest of each recovery to unfold."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

import pandas as pd

from engine.core.texts import counted
from engine.report.load import RunTables
from engine.report.pages.frame import html_table
from engine.report.pages.timeline import slots_text
from engine.report.pages.words import word
from engine.report.recovery import ALL_PHASES, FROM_CHECKPOINT, NO_WORKER_LOST, stalls_of


def recoveries_section(run: RunTables) -> str:
    """Returns the section as HTML; a run without faults and failures has none."""
    if run.recovery.empty:
        return ""
    rows = run.recovery.to_dict("records")
    table = html_table(pd.DataFrame([_costs(run, place, row) for place, row in enumerate(rows)]))
    if run.recovery["outcome"].isin(NO_WORKER_LOST).all():
        return f"<section><h2>Faults</h2>{table}</section>"
    heading = "<h2>Recoveries <small>(ms; click merged or heal to see the time after the pause)</small></h2>"
    unfolded = "".join(_details(place, row) for place, row in enumerate(rows))
    return f'<section>{heading}<div id="phases" class="chart"></div>{table}{unfolded}</section>'


def _costs(run: RunTables, place: int, row: dict[Any, Any]) -> dict[str, Any]:
    stalls = stalls_of(run.recovery.iloc[[place]])
    redone = row["redone_actions"]
    return {
        "": place + 1,
        "what": row["what"],
        "step": row["step"],
        "took over": _heirs(run, place),
        "training stalled": str(stalls[0]) if stalls else "",
        "redone": "" if pd.isna(redone) else f"{counted(redone, 'action')}, {counted(row['samples_redone'], 'sample')}",
        "outcome": row["outcome"],
    }


def _heirs(run: RunTables, place: int) -> str:
    """Returns the heirs of a recovery with the stages that they took over, such as ``worker 1: stage 2``."""
    if run.recovery["rung"].iloc[place] == FROM_CHECKPOINT:
        return ""  # all workers were started again
    begins = [*run.recovery["begin_ms"], float("inf")]
    since = run.takeovers["from_ms"]
    taken = run.takeovers[(since >= begins[place]) & (since < begins[place + 1])]
    return "; ".join(
        f"worker {heir}: {slots_text(of[['pipeline', 'stage']].to_numpy(), run.job)}"
        for heir, of in taken.groupby("heir")
    )


def _details(place: int, row: dict[Any, Any]) -> str:
    """Returns the phases, the throughput and the bytes of one recovery, to unfold."""
    pairs = "".join(f"<div><dt>{name}</dt><dd>{html.escape(text)}</dd></div>" for name, text in _pairs(row) if text)
    return f'<details><summary>Recovery {place + 1} in detail</summary><dl class="pairs">{pairs}</dl></details>'


def _pairs(row: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    for phase in ALL_PHASES:
        yield word(phase), _ms(row[f"{phase}_ms"])
    yield f"{word('pause')}, detect to replay", _ms(row["pause_ms"])
    yield "phases that span hosts, more or less", _ms(row["uncertain_ms"])
    speeds = [row[f"samples_per_s_{when}"] for when in ("before", "during", "after")]
    known = ["-" if pd.isna(each) else f"{each:,.0f}" for each in speeds]
    yield "samples per second before, during and after", "" if pd.isna(speeds).all() else ", ".join(known)
    yield "bytes sent in the plan", _megabytes(row["plan_bytes"])
    yield "bytes sent to heal", _megabytes(row["heal_bytes"])
    yield "the state came from", row["rung"]
    yield "last action of the lost worker", row["last_action"]
    yield "reason", row["reason"]


def _ms(value: float) -> str:
    return "" if pd.isna(value) else f"{value:,.1f} ms" if value >= 10 else f"{value:.3g} ms"


def _megabytes(value: Any) -> str:
    return "" if pd.isna(value) or not value else f"{value / 1e6:,.2f} MB"
