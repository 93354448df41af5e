"""The timeline's data: columns of numbers, of which the page draws the part in view.

Rules: a page holds at most `MAX_ACTIONS` single actions; steps near a recovery come first. Of every step it holds one
bar per worker. Times are milliseconds since training began.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from engine.core.config.job import Job
from engine.core.texts import spans
from engine.report.action_arrays import KINDS
from engine.report.load import RunTables
from engine.report.pages.words import definition
from engine.report.recovery import ALL_PHASES, NO_WORKER_LOST

MAX_ACTIONS = 150_000
MAX_STEPS = 10_000
REDUNDANT, _REPLAYED, _TAKEN_OVER = 1, 2, 4  # bits that choose the pattern of a bar


def timeline(run: RunTables) -> dict[str, Any]:
    """Returns the data from which the page draws the timeline, as values for JSON; arrays are base64 of their bytes."""
    shown = _nearest(run.actions, run.recovery)
    codes, texts = pd.factorize(shown["action"])
    origin_ns = run.origin_ns
    taken_over = _of_others(shown, run) & ~shown["redundant"]
    marks = shown["redundant"] * REDUNDANT + shown["replayed"] * _REPLAYED + taken_over * _TAKEN_OVER
    return {
        "unit": "ms",
        "numbered": False,
        "axis": "ms since training began",
        "all": "Whole run",
        "told": "worker %{customdata[1]}, step %{customdata[2]}, epoch %{customdata[3]}",
        "kinds": list(KINDS),
        "definitions": [definition(kind) for kind in KINDS],
        "texts": [str(text) for text in texts],
        "workers": [_worker(row, run) for row in run.workers.itertuples()],
        "actions": {
            "worker": packed(shown["worker"], "<i4"),
            "start": packed((shown["start_ns"] - origin_ns) / 1e6, "<f8"),
            "length": packed((shown["end_ns"] - shown["start_ns"]) / 1e6, "<f4"),
            "step": packed(shown["step"], "<i4"),
            "epoch": packed(shown["epoch"], "<i4"),
            "text": packed(codes, "<i4"),
            "kind": packed(shown["kind"], "<u1"),
            "mark": packed(marks, "<u1"),
        },
        "bars": _bars(run.bars, origin_ns),
        "commits": [round(at, 4) for at in run.steps["commit_ms"]],
        "steps": run.steps["step"].tolist(),
        "recoveries": [_recovery(row) for row in run.recovery.to_dict("records")],
        "left_out": int(run.workers["num_actions"].sum()) - len(shown),
        "end": run.end_ms,
    }


def drawable(run: RunTables) -> tuple[RunTables, int]:
    """Returns a run with the steps that a page can draw, and n if these are one of n beside those with actions."""
    every = -(-len(run.steps) // MAX_STEPS)
    if every <= 1:
        return run, 1
    places = np.arange(len(run.steps))
    validated = run.steps["validation_loss"].notna()
    kept = (places % every == 0) | run.steps["step"].isin(run.actions["step"].unique())
    kept |= validated & (validated.cumsum() % max(1, every // 10) == 0)
    steps = run.steps[kept]
    drawn = {*steps["step"]}
    bars = run.bars[run.bars["step"].isin(drawn)]
    twin_loss = {step: loss for step, loss in run.twin_loss.items() if step in drawn}
    evaluations = run.evaluations[run.evaluations["step"].isin(drawn)]
    return replace(run, evaluations=evaluations, steps=steps, bars=bars, twin_loss=twin_loss), every


def _nearest(actions: pd.DataFrame, recovery: pd.DataFrame) -> pd.DataFrame:
    """Returns the actions of whole steps, at most `MAX_ACTIONS`, in the order of their beginning."""
    if len(actions) > MAX_ACTIONS:
        steps = actions.groupby("step").size()
        centres = recovery["step"].dropna().to_numpy(dtype=np.int64)
        centres = centres if len(centres) else np.array([steps.index.min()])
        distance = np.abs(steps.index.to_numpy()[:, None] - centres[None, :]).min(axis=1)
        in_turn = steps.iloc[np.argsort(distance, kind="stable")]
        actions = actions[actions["step"].isin(in_turn.index[in_turn.cumsum() <= MAX_ACTIONS])]
    return actions.sort_values("start_ns", kind="stable")


def packed(values: Any, dtype: str) -> tuple[str, str]:
    """Returns the type of an array and base64 of its bytes."""
    return dtype[1:], base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()


def _of_others(actions: pd.DataFrame, run: RunTables) -> pd.Series:
    """Returns for each action whether its worker took over the slot from another worker."""
    slot = ["worker", "pipeline", "stage"]
    since_ms = run.takeovers.groupby(["heir", "pipeline", "stage"])["from_ms"].min()
    known = pd.MultiIndex.from_frame(actions[slot])
    begin_ms = pd.Series(since_ms.reindex(known).fillna(np.inf).to_numpy(), index=actions.index)
    return (actions["start_ns"] - run.origin_ns) / 1e6 >= begin_ms


def _worker(row: Any, run: RunTables) -> dict[str, Any]:
    """Returns the line of a worker: its name, its first slots, the slots that it took over, and its end."""
    slots = [tuple(map(int, each.split("."))) for each in row.slots.split()]
    lost = run.takeovers[run.takeovers["before"] == row.worker]
    gained = run.takeovers[run.takeovers["heir"] == row.worker]
    also = []
    for (from_ms, before), each in gained.groupby(["from_ms", "before"]):
        taken = slots_text(each[["pipeline", "stage"]].to_numpy(), run.job)
        also.append(f"from {from_ms / 1e3:.1f} s also {taken} (of worker {before})")
    is_gone = row.state not in ("finished", "stopped", "running")
    heirs = [f"worker {heir}" for heir in dict.fromkeys(lost["heir"])]
    goes_on = f"; {' and '.join(heirs)} took over" if heirs else ""
    return {
        "worker": row.worker,
        "slots": slots_text(slots, run.job),
        "also": also,
        "also_short": f"+ {slots_text(gained[['pipeline', 'stage']].to_numpy(), run.job)}" if len(gained) else "",
        "state": f"{row.state}{goes_on}",
        "end": row.end_ms if is_gone else None,
    }


def slots_text(slots: Iterable[Sequence[int]], job: Job) -> str:
    """Returns slots of a job in words: ``stages 0, 7``, ``blocks 0-3``, beside others ``stage 1 of pipeline 0``."""
    by_pipeline: dict[int, list[int]] = {}
    for pipeline, stage in slots:
        by_pipeline.setdefault(int(pipeline), []).append(int(stage))
    return ", ".join(
        f"{job.slot_noun}{'s' if len(stages) > 1 else ''} {', '.join(spans(stages))}"
        + ("" if job.pipelines == 1 else f" of pipeline {pipeline}")
        for pipeline, stages in by_pipeline.items()
    )


def _bars(bars: pd.DataFrame, origin_ns: int) -> dict[str, tuple[str, str]]:
    """Returns one bar per worker and step: its start, its length, and the busy share of that length."""
    length_ns = (bars["end_ns"] - bars["start_ns"]).clip(lower=1)
    return {
        "worker": packed(bars["worker"], "<i4"),
        "step": packed(bars["step"], "<i4"),
        "epoch": packed(bars["epoch"], "<i4"),
        "start": packed((bars["start_ns"] - origin_ns) / 1e6, "<f8"),
        "length": packed(length_ns / 1e6, "<f4"),
        "busy": packed(bars["busy_ns"] / length_ns, "<f4"),
    }


def _recovery(row: dict[Any, Any]) -> dict[str, Any]:
    phases = [[phase, row[f"{phase}_ms"]] for phase in ALL_PHASES if not pd.isna(row[f"{phase}_ms"])]
    known = {name: None if pd.isna(row[name]) else row[name] for name in ("begin_ms", "resume_ms", "healed_ms")}
    if row["outcome"] in NO_WORKER_LOST:
        known["resume_ms"] = row["begin_ms"]  # nothing was interrupted
    texts = {name: str(row[name]) for name in ("what", "verdict", "who", "outcome", "last_action")}
    return known | texts | {"phases": phases, "step": None if pd.isna(row["step"]) else int(row["step"])}
