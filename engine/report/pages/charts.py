"""The charts beside the timeline, as plotly figures; the page gives them the colours of its theme.

Rules: colours are from the palette of Okabe and Ito, which colour-blind readers can tell apart. Every text from outside
is escaped, because plotly interprets some HTML.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from engine.report.load import RunTables
from engine.report.recovery import ALL_PHASES, NO_WORKER_LOST

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C"
# In the order of `KINDS`.
KIND_COLOURS = (SKY, ORANGE, YELLOW, "#BFC4CA", GREEN, BLUE, PURPLE)
PHASE_COLOURS = dict(
    zip(ALL_PHASES, (VERMILLION, ORANGE, YELLOW, GREEN, "#7FCFB9", SKY, BLUE, GREY, PURPLE), strict=True)
)
LEGEND = {"orientation": "h", "y": 1.0, "yanchor": "bottom"}
_AFTER_THE_PAUSE = ("merged", "heal")


def charts(run: RunTables) -> dict[str, Any]:
    """Returns the figures as values for JSON, by the id of their place on the page."""
    figures = {"loss": _loss(run), "throughput": _throughput(run), "exposure": _exposure(run)}
    if run.workers["peak_memory_mib"].notna().any():
        figures["memory"] = _memory(run)
    recovery = run.recovery[~run.recovery["outcome"].isin(NO_WORKER_LOST)]
    if len(recovery):
        figures["phases"] = _phases(recovery)
    return {name: figure.update_layout(template=None).to_plotly_json() for name, figure in figures.items()}


def _phases(recovery: pd.DataFrame) -> go.Figure:
    labels = [
        f"{place + 1}: worker {html.escape(row.who)}, step {row.step}" if row.who else f"{place + 1}: step {row.step}"
        for place, row in enumerate(recovery.itertuples())
    ]
    figure = go.Figure()
    for phase in ALL_PHASES:
        taken = recovery[f"{phase}_ms"].tolist()
        figure.add_bar(
            name=phase,
            orientation="h",
            x=[0.0 if pd.isna(each) else each for each in taken],
            y=labels,
            marker={"color": PHASE_COLOURS[phase]},
            visible="legendonly" if phase in _AFTER_THE_PAUSE else True,
            hovertemplate=f"{phase}: %{{x:.2f}} ms<extra></extra>",
        )
    figure.update_layout(barmode="stack", height=130 + 34 * len(labels), xaxis_title_text="milliseconds")
    figure.update_layout(yaxis={"autorange": "reversed", "automargin": True}, legend=LEGEND, legend_traceorder="normal")
    return figure


def _loss(run: RunTables) -> go.Figure:
    figure = go.Figure()
    if run.twin_loss:
        _add_line(figure, "without the fault", run.twin_loss, run.twin_loss.values(), GREY, width=5, dash="dot")
    _add_line(figure, "training", run.steps["step"], run.steps["loss"], BLUE, width=2)
    validated = run.steps.dropna(subset="validation_loss")
    if len(validated):
        _add_line(figure, "validation", validated["step"], validated["validation_loss"], ORANGE, dash="dot")
        figure.data[-1].update(mode="lines+markers", marker={"size": 7, "symbol": "diamond"})
    return _by_step(figure, run, "loss")


def _throughput(run: RunTables) -> go.Figure:
    figure = go.Figure()
    _add_line(figure, "samples/s", run.steps["step"], run.steps["samples_per_s"], GREEN, width=2, shape="hvh")
    figure.update_yaxes(rangemode="tozero")
    return _by_step(figure, run, "samples per second")


def _add_line(
    figure: go.Figure, name: str, x: Iterable[int], y: Iterable[float], colour: str, **line: str | int
) -> None:
    figure.add_scatter(x=list(x), y=list(y), name=name, mode="lines", line={"color": colour, **line})


def _by_step(figure: go.Figure, run: RunTables, unit: str) -> go.Figure:
    for step in run.recovery["step"].dropna():
        figure.add_vline(x=int(step), line={"color": VERMILLION, "width": 1.5, "dash": "dash"})
    figure.update_layout(height=240, hovermode="x unified", showlegend=len(figure.data) > 1, legend=LEGEND)
    return figure.update_layout(xaxis_title_text="step", yaxis_title_text=unit)


def _memory(run: RunTables) -> go.Figure:
    known = run.workers.dropna(subset="peak_memory_mib")
    figure = go.Figure()
    figure.add_bar(
        x=[f"worker {worker}" for worker in known["worker"]],
        y=known["peak_memory_mib"].tolist(),
        customdata=known["peak_stash"].fillna(0).tolist(),
        marker={"color": SKY},
        hovertemplate="%{x}: %{y:.0f} MiB, at most %{customdata} microbatches stashed<extra></extra>",
    )
    return figure.update_layout(height=240, yaxis_title_text="peak memory, MiB", bargap=0.4)


def _exposure(run: RunTables) -> go.Figure:
    figure = go.Figure()
    lengths = (run.exposure["to_ms"] - run.exposure["from_ms"]).tolist()
    figure.add_bar(
        orientation="h",
        base=[0.0],
        x=[run.end_ms],
        y=[""],
        marker={"color": GREEN, "opacity": 0.35},
        hovertemplate="every slot has a replica<extra></extra>",
    )
    figure.add_bar(
        orientation="h",
        base=run.exposure["from_ms"].tolist(),
        x=lengths,
        y=[""] * len(lengths),
        marker={"color": VERMILLION},
        customdata=lengths,
        hovertemplate="exposed for %{customdata:.1f} ms<extra></extra>",
    )
    figure.update_layout(barmode="overlay", height=240, bargap=0.5, showlegend=False)
    return figure.update_layout(xaxis_title_text="ms since training began")
