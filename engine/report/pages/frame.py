"""What pages share: their templates, their heading, tables and charts; no network is needed.

Rules: templates escape every text that they are given; only our own files are handed over as they are. A page's content
security policy allows only the scripts that it names by their hashes, and no network access. Data and programs are
compressed, because Plotly alone has 1.2 MB: `plotly-basic.min.js` is the file of the npm package
plotly.js-basic-dist-min 4.1.1.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import cycle
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import engine
from engine.report.formats import cell_text
from engine.report.load import RunTables
from engine.report.tables import ALL_PHASES, NO_WORKER_LOST
from engine.report.time_table import TIMES

# The words of a page with their definitions, which the page shows under the mouse and to a keyboard.
#
# Rule: definitions come from the glossary of `engine`; only words of charts that no code uses are defined here.


_LINE = re.compile(r"^([a-z-]+): (.+)$", re.MULTILINE)
_OF_CHARTS = {
    "waiting": "the time in which a worker waits for a tensor of another worker, with its receipt.",
    "redone": "the forwards and backwards that were computed a second time, because their results were gone.",
    "step": "one optimizer step of the whole job.",
}
_SAME = {
    "training stalled": "stall",
    "peak stashed activations": "stash",
    "took over": "heir",
    "waits, % of the time": "bubble",
    "stages": "stage",
    "blocks": "block",
    "actions": "action",
    "last action": "action",
    "redundant forwards": "redundancy",
    "recoveries": "recovery",
}
_DEFINED = dict(_LINE.findall(engine.__doc__ or "")) | _OF_CHARTS  # python -OO leaves no glossary


def definition(text: str) -> str:
    """Returns the definition of a word, or of the first known word of a list such as ``reduce, log``; else nothing."""
    words = (_SAME.get(each, each) for each in (text, *text.split(", ")))
    return next((_DEFINED[each] for each in words if each in _DEFINED), "")


Tile = tuple[str, str, str]  # title, figure, unit
_TEXT_COLUMNS = {"what", "text", "reason"}
_MOODS = {"passed": "good", "failed": "bad", "invalid": "open", "not judged": "open"}  # of the results of checks


@dataclass(frozen=True, slots=True)
class Heading:
    """The top of a page; `mood` is good, bad or open.

    `when` says when it happened, `weights` has the mood and the text of the line on the comparison with the twin, and
    `facts` are lines about the job and the machine.
    """

    command: str
    name: str
    mood: str
    sentence: str
    tiles: Sequence[Tile]
    when: str = ""
    facts: Sequence[str] = ()
    weights: tuple[str, str] = ("", "")


def rendered(template: str, heading: Heading, scripts: Sequence[str], **values: Any) -> str:
    """Returns a page as HTML; it may run these scripts only."""
    page = _environment().get_template(template)
    return page.render(heading=heading, policy=_policy(scripts), css=asset("page.css"), **values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("engine.report.pages", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["definition"] = definition
    environment.filters |= {"compressed": _compressed, "with_units": _with_units}
    return environment


def asset(name: str) -> Markup:
    """Returns the text of a file in the folder of this module, which a page has as it is."""
    return Markup(files("engine.report.pages").joinpath(name).read_text(encoding="utf-8"))  # noqa: S704 our own file


def table_of(table: pd.DataFrame) -> dict[str, Any]:
    """Returns a table as a template shows it: names and texts, each with the class of its cell."""
    names = [str(name) for name in table.columns]
    kinds = ["number" if pd.api.types.is_numeric_dtype(dtype) else "" for dtype in table.dtypes]
    rows = [
        [
            (name, _kind(name, value, kind), cell_text(value))
            for name, value, kind in zip(names, row, kinds, strict=True)
        ]
        for row in table.itertuples(index=False, name=None)
    ]
    return {"heads": list(zip(names, kinds, strict=True)), "rows": rows}


def _kind(name: str, value: Any, of_column: str) -> str:
    if name == "result":
        return _MOODS.get(str(value), "")
    return of_column or ("text" if name in _TEXT_COLUMNS else "")


def _with_units(text: str) -> str:
    """Returns a text in which no line ends between a figure and its unit."""
    return re.sub(r"(\d) (ms|s|%)(?!\w)", "\\1\u00a0\\2", text)


def _policy(scripts: Sequence[str]) -> str:
    """Returns the content security policy of a page that may run these scripts only."""
    hashes = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


_LEVEL = 6  # the last three percent of the size would take three times as long


def _compressed(text: str) -> str:
    """Returns base64 of a text under gzip; it has no character that could end its HTML element."""
    return base64.b64encode(gzip.compress(text.encode(), _LEVEL, mtime=0)).decode()


# The charts beside the timeline, as figures for Plotly's script; the page gives them the colours of its theme.
#
# Rules: colours are from the palette of Okabe and Ito, which colour-blind readers can tell apart. Plotly interprets
# some HTML, so page.js escapes every text of a figure but the hovertemplates, in which no text from outside may stand.

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C"
TRANSFER, WAITING = "#9AA5B1", "#E6E9ED"  # timeline.js has their counterparts of a dark page
# In the order of `KINDS`.
KIND_COLOURS = (SKY, ORANGE, YELLOW, TRANSFER, GREEN, BLUE, PURPLE, WAITING)
PHASE_COLOURS = dict(
    zip(ALL_PHASES, (VERMILLION, ORANGE, YELLOW, GREEN, "#7FCFB9", SKY, BLUE, GREY, PURPLE), strict=True)
)
LEGEND = {"orientation": "h", "y": 1.0, "yanchor": "bottom"}
# The kinds of time, from work to waits, in the order of the stack.
TIME_COLOURS = dict(
    zip(
        TIMES,
        (
            *(PURPLE, SKY, ORANGE, YELLOW, "#C9A227", "#A8D8F0", VERMILLION, TRANSFER, GREEN, "#7FCFB9", "#B07AA1"),
            *(BLUE, "#5B7FA6", "#8FA9C4", "#B9C9DA", GREY, "#F4B8A0", "#E6E9ED", "#D3D8DE", "#C4CBD3", "#B4BDC7"),
        ),
        strict=True,
    )
)
_AFTER_THE_PAUSE = ("merged", "heal")
_HEIGHT = 240
_LEAST_SHARE = 0.05  # %, of a kind of time in some worker's
_MOST_TIMED = 30_000  # actions in the picture of time: a second of work
_OF_SETS = (ORANGE, GREEN, PURPLE, SKY, VERMILLION)  # the evaluation sets, in their order

Figure = dict[str, Any]  # with `data`, a list of traces, and `layout`


def charts(run: RunTables) -> dict[str, Figure]:
    """Returns the figures as values for JSON, by the id of their place on the page."""
    figures = {"loss": _loss(run), "throughput": _throughput(run), "exposure": _exposure(run)}
    if len(metric_names(run)):
        figures["metrics"] = _metrics(run)
    if run.workers["peak_memory_mib"].notna().any():
        figures["memory"] = _memory(run)
    if len(run.memory):
        figures["gpu"] = _gpu_memory(run)
    if len(run.actions):
        figures["time"] = _time(run)
    recovery = run.recovery[~run.recovery["outcome"].isin(NO_WORKER_LOST)]
    if len(recovery):
        figures["phases"] = _phases(recovery)
    return figures


def title(text: str) -> dict[str, Any]:
    """Returns the title of an axis."""
    return {"title": {"text": text}}


def _phases(recovery: pd.DataFrame) -> Figure:
    labels = [
        f"{place + 1}: worker {row.who}, step {row.step}" if row.who else f"{place + 1}: step {row.step}"
        for place, row in enumerate(recovery.itertuples())
    ]
    traces = [
        {
            "type": "bar",
            "name": phase,
            "orientation": "h",
            "x": recovery[f"{phase}_ms"].fillna(0.0).tolist(),
            "y": labels,
            "marker": {"color": PHASE_COLOURS[phase]},
            "visible": "legendonly" if phase in _AFTER_THE_PAUSE else True,
            "hovertemplate": f"<b>{phase}</b>: %{{x:.2f}} ms<br>{definition(phase)}<extra></extra>",
        }
        for phase in ALL_PHASES
    ]
    layout = {
        "barmode": "stack",
        "height": 130 + 34 * len(labels),
        "xaxis": title("milliseconds") | {"tickformat": ",~f"},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": LEGEND | {"traceorder": "normal"},
    }
    return {"data": traces, "layout": layout}


def _first_shown(run: RunTables) -> int:
    """Returns the first step of the picture of time: one of a long run shows its last steps."""
    steps = run.actions["step"]
    return int(steps.sort_values().iloc[-_MOST_TIMED]) + 1 if len(steps) > _MOST_TIMED else 0


def _time(run: RunTables) -> Figure:
    """Returns a stacked bar per worker: the share of each kind of time in its wall clock, for the kinds that it has."""
    first = _first_shown(run)
    part = f", from step {first} on" if first else ""
    sums = run.times_from(first).time().drop(columns=["step", "flops", "mfu"]).groupby("worker").sum()
    shares = 100 * sums.div(sums.pop("wall_ms").where(lambda wall_ms: wall_ms > 0, 1.0), axis="index")
    traces = [
        {
            "type": "bar",
            "name": kind.replace("_", " "),
            "orientation": "h",
            "x": shares[f"{kind}_ms"].tolist(),
            "y": [f"worker {worker}" for worker in shares.index],
            "customdata": (sums[f"{kind}_ms"] / 1e3).tolist(),
            "marker": {"color": colour},
            "hovertemplate": f"<b>{kind.replace('_', ' ')}</b>: %{{x:.1f}} %, %{{customdata:.2f}} s<extra></extra>",
        }
        for kind, colour in TIME_COLOURS.items()
        if (shares[f"{kind}_ms"] >= _LEAST_SHARE).any()
    ]
    layout = {
        "barmode": "stack",
        "height": 150 + 34 * len(shares),
        "xaxis": title(f"% of the wall clock{part}") | {"range": [0, 100]},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": LEGEND | {"traceorder": "normal"},
    }
    return {"data": traces, "layout": layout}


def _loss(run: RunTables) -> Figure:
    lines = []
    if run.twin_loss:
        lines.append(_line("without the fault", run.twin_loss, run.twin_loss.values(), color=GREY, width=5, dash="dot"))
    lines.append(_line("training", run.steps["step"], run.steps["loss"], color=BLUE, width=2))
    for colour, (name, rows) in zip(cycle(_OF_SETS), run.evaluations.groupby("set", sort=False), strict=False):
        lines.append(_points(str(name), rows["step"], rows["loss"], colour))
    return _by_step(lines, run, "loss")


def metric_names(run: RunTables) -> list[str]:
    """Returns the names of the metrics of a run's evaluation sets."""
    return [str(each) for each in run.evaluations.columns.drop(["step", "set", "samples", "loss"])]


def _metrics(run: RunTables) -> Figure:
    """Returns a line for each metric of each evaluation set."""
    rows = run.evaluations.melt(id_vars=["step", "set"], value_vars=metric_names(run)).dropna(subset="value")
    groups = rows.groupby(["variable", "set"], sort=False)
    is_one = rows["set"].nunique() == 1
    lines = [
        _points(str(name) if is_one else f"{name}, {of}", group["step"], group["value"], colour)
        for colour, ((name, of), group) in zip(cycle(_OF_SETS), groups, strict=False)
    ]
    return _by_step(lines, run, "metric")


def _points(name: str, x: Iterable[int], y: Iterable[float], colour: str) -> dict[str, Any]:
    points = _line(name, x, y, color=colour, dash="dot")
    return points | {"mode": "lines+markers", "marker": {"size": 7, "symbol": "diamond"}}


def _throughput(run: RunTables) -> Figure:
    line = _line("samples/s", run.steps["step"], run.steps["samples_per_s"], color=GREEN, width=2, shape="hvh")
    return _by_step([line], run, "samples per second", rangemode="tozero")


def _line(name: str, x: Iterable[int], y: Iterable[float], **line: str | int) -> dict[str, Any]:
    return {"type": "scatter", "name": name, "mode": "lines", "x": list(x), "y": list(y), "line": line}


def _by_step(lines: list[dict[str, Any]], run: RunTables, unit: str, **axis: str) -> Figure:
    """Returns a chart over the steps, with a dashed line at each recovery."""
    dashed = {"color": VERMILLION, "width": 1.5, "dash": "dash"}
    marks = [
        {"type": "line", "x0": int(step), "x1": int(step), "yref": "paper", "y0": 0, "y1": 1, "line": dashed}
        for step in run.recovery["step"].dropna()
    ]
    layout = {
        "height": _HEIGHT,
        "hovermode": "x unified",
        "showlegend": len(lines) > 1,
        "legend": LEGEND,
        "shapes": marks,
        "xaxis": title("step"),
        "yaxis": title(unit) | axis,
    }
    return {"data": lines, "layout": layout}


def _memory(run: RunTables) -> Figure:
    """Returns a bar per worker; a worker that did not live to tell its memory has its end in place of a bar."""
    names = [f"worker {worker}" for worker in run.workers["worker"]]
    lost = run.workers["peak_memory_mib"].isna()
    bar = {
        "type": "bar",
        "x": names,
        "y": run.workers["peak_memory_mib"].fillna(0.0).tolist(),
        "customdata": run.workers["peak_stash"].fillna(0).tolist(),
        "marker": {"color": SKY},
        "hovertemplate": "%{x}: %{y:.0f} MiB, at most %{customdata} stashed activations<extra></extra>",
    }
    ends = [
        {"x": name, "y": 0, "yanchor": "bottom", "showarrow": False, "textangle": -90} | {"text": f"{state}, not known"}
        for name, state, is_lost in zip(names, run.workers["state"], lost, strict=True)
        if is_lost
    ]
    layout = {"height": _HEIGHT, "yaxis": title("peak memory, MiB"), "bargap": 0.4, "annotations": ends}
    return {"data": [bar], "layout": layout}


def _gpu_memory(run: RunTables) -> Figure:
    """Returns a line over the steps for each worker; its points are the steps in which the memory became another."""
    lines = [
        _line(f"worker {worker}", of["step"], of["allocated_mib"], shape="hv", width=2)
        for worker, of in run.memory.groupby("worker")
    ]
    return _by_step(lines, run, "memory of the GPU, MiB", rangemode="tozero")


def _exposure(run: RunTables) -> Figure:
    """Returns one band over the run: every slot has a replica beside its owner's, or some slot has none."""
    begins = (run.exposure["from_ms"] / 1e3).tolist()
    lengths = ((run.exposure["to_ms"] - run.exposure["from_ms"]) / 1e3).tolist()
    band = {"type": "bar", "orientation": "h", "width": 0.5}
    covered = band | {
        "name": "a second replica of every slot",
        "base": [0.0],
        "x": [run.end_ms / 1e3],
        "y": [""],
        "marker": {"color": GREEN, "opacity": 0.35},
        "hovertemplate": "every slot has a second replica<extra></extra>",
    }
    exposed = band | {
        "name": "exposed: another loss could end the run",
        "base": begins,
        "x": lengths,
        "y": [""] * len(lengths),
        "marker": {"color": VERMILLION},
        "customdata": lengths,
        "hovertemplate": "exposed for %{customdata:.2f} s<extra></extra>",
    }
    layout = {
        "barmode": "overlay",
        "height": 170,
        "showlegend": True,
        "legend": LEGEND,
        "xaxis": title("seconds since training began"),
    }
    return {"data": [covered, exposed] if lengths else [covered], "layout": layout}
