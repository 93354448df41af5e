"""The page of a job's program: its dry run as a timeline, and the activations that each worker stashes over time.

Rules: only compute actions are shown, because all others take no time in a dry run. A box has the number of its
microbatch where that fits, and is the darker the later its stage. A box for another worker's slot is striped. The lower
chart follows the zoom of the upper one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from engine.core.action import COMPUTE_OPS, OP_TABLE, StepPosition
from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from engine.core.job.schedule_comparison import over_none
from engine.core.ownership import Ownership
from engine.core.program.dry_run import DryRun, bubbles, dry_run, stash_curves
from engine.core.program.schedule_csv import name_of
from engine.core.texts import counted
from engine.report.pages.frame import (
    BLUE,
    GREEN,
    GREY,
    LEGEND,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Figure,
    Heading,
    Tile,
    asset,
    definition,
    framed,
    html_table,
    title,
)
from engine.report.pages.page import REDUNDANT, packed, slots_text

_OPS = [op for op, row in OP_TABLE.items() if row.work and row.stands is not StepPosition.AGAIN]
_COLOURS = (SKY, ORANGE, YELLOW, GREEN)
_LINES = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, GREY)
_UNIT = "A unit is a forward of one {}; a backward takes two, or one for each of its parts. Numbers are microbatches."
_DARKEST = 255
_DASHES = ("solid", "dash", "dot", "dashdot")


def schedule_page(job: Job) -> str:
    """Returns the page as HTML; the unit of time is a forward of one slot, and a backward takes two units."""
    program, ownership = initial_program(job)
    run = dry_run(program, ownership)
    idle = bubbles(run)
    name = name_of(job.schedule)
    shape = f"{job.cut}, {counted(job.microbatches, 'microbatch', 'microbatches')}"
    all_alike = max(idle.values()) - min(idle.values()) < 0.005
    waits = (
        f"each worker waits {run.bubble:.0%} of them"
        if all_alike
        else f"a worker waits {run.bubble:.0%} of them on average"
    )
    told = f"{name}, {shape}: {counted(run.makespan, 'unit')}, {waits}".replace("%", " %")
    stashed = "microbatches" if job.blocks == 1 else "microbatches of a block"
    tiles: list[Tile] = [
        ("length", f"{run.makespan:g}", "units"),
        ("bubble", f"{run.bubble:.1%}".replace("%", " %"), "of the time"),
        ("peak stashed activations", f"{max(run.peak_stash.values())}", f"{stashed}, on one worker"),
        ("workers", f"{len(idle)}", f"for {counted(job.slots * job.pipelines, job.slot_noun)}"),
    ]
    if job.redundancy == "eager":
        tiles.append(("redundant forwards", f"{over_none(run, job.schedule, ownership):.1%}", "longer than none"))
    slots = {worker: slots_text(ownership.slots_of(worker), job) for worker in idle}
    table = pd.DataFrame(
        {
            "worker": list(idle),
            f"{job.slot_noun}s": [slots[worker] for worker in idle],
            "waits, % of the time": [100 * share for share in idle.values()],
            "peak stashed activations": [run.peak_stash[worker] for worker in idle],
        }
    )
    data = {
        "timeline": _timeline(run, ownership, slots, idle),
        "charts": {"stash": _stash(run)},
        "colours": _COLOURS,
        "phase_colours": {},
    }
    sections = asset("schedule.html").replace("$workers", html_table(table))
    facts = [_UNIT.format(job.slot_noun), f"Redundancy {job.redundancy}."]
    heading = Heading("bamboo schedule", name, "open", told, tiles, facts=facts)
    return framed(heading, sections, data)


def _timeline(run: DryRun, ownership: Ownership, slots: dict[int, str], idle: dict[int, float]) -> dict[str, Any]:
    """Returns the data of the page's script, in the form of `engine.report.pages.page`."""
    spans = [span for span in run.spans if span.action.op in COMPUTE_OPS]
    redundant = [ownership.owner(each.action.pipeline, each.action.stage) != each.worker for each in spans]
    nothing, all_bars = np.zeros(len(spans)), np.zeros(len(idle))
    last_stage = max(1, *(each.action.stage for each in spans))
    return {
        "unit": "unit",
        "axis": "units",
        "numbered": True,
        "all": "Whole step",
        "told": "worker %{customdata[1]}",
        "follower": "stash",
        "kinds": [OP_TABLE[op].about for op in _OPS],
        "definitions": [definition(OP_TABLE[op].about) for op in _OPS],
        "texts": [str(span.action) for span in spans],
        "workers": [
            {"worker": each, "slots": slots[each], "also": [], "also_short": "", "state": "", "end": None}
            for each in idle
        ],
        "actions": {
            "worker": packed([span.worker for span in spans], "<i4"),
            "start": packed([span.start for span in spans], "<f8"),
            "length": packed([span.end - span.start for span in spans], "<f4"),
            "step": packed(nothing, "<i4"),
            "epoch": packed(nothing, "<i4"),
            "text": packed(range(len(spans)), "<i4"),
            "kind": packed([_OPS.index(span.action.op) for span in spans], "<u1"),
            "mark": packed(np.array(redundant) * REDUNDANT, "<u1"),
            "shade": packed([each.action.stage * _DARKEST // last_stage for each in spans], "<u1"),
        },
        "bars": {
            "worker": packed(list(idle), "<i4"),
            "step": packed(all_bars, "<i4"),
            "epoch": packed(all_bars, "<i4"),
            "start": packed(all_bars, "<f8"),
            "length": packed(all_bars + run.makespan, "<f4"),
            "busy": packed([1 - share for share in idle.values()], "<f4"),
        },
        "commits": [],
        "steps": [],
        "recoveries": [],
        "end": run.makespan,
    }


def _stash(run: DryRun) -> Figure:
    lines = []
    for place, (worker, curve) in enumerate(stash_curves(run).items()):
        turn, colour = divmod(place, len(_LINES))
        lines.append(
            {
                "type": "scatter",
                "x": [at for at, _ in curve],
                "y": [stashed for _, stashed in curve],
                "name": f"worker {worker}",
                "mode": "lines",
                "line": {"color": _LINES[colour], "dash": _DASHES[turn % len(_DASHES)], "shape": "hv", "width": 2},
                "hovertemplate": "%{y} from %{x} on<extra>%{fullData.name}</extra>",
            }
        )
    layout = {
        "height": 300,
        "hovermode": "closest",
        "dragmode": False,
        "showlegend": True,
        "legend": LEGEND,
        "xaxis": title("units") | {"range": [0, run.makespan], "fixedrange": True},
        "yaxis": title("microbatches") | {"rangemode": "tozero", "fixedrange": True},
    }
    return {"data": lines, "layout": layout}
