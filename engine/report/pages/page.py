"""The page of a run; its heading states the outcome."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd

from engine.core.checks.recoveries import Stall, quantile
from engine.core.history.process_records import HostRecord
from engine.core.job.job import Job
from engine.core.job.samples import passes
from engine.core.program.schedule_csv import name_of
from engine.core.texts import counted, sentence, spans
from engine.core.units import finite
from engine.report.actions import KINDS
from engine.report.headline import command, headline
from engine.report.load import RunTables, exceptions_in_words
from engine.report.pages.frame import (
    KIND_COLOURS,
    PHASE_COLOURS,
    Heading,
    Tile,
    asset,
    charts,
    definition,
    metric_names,
    rendered,
    table_of,
)
from engine.report.tables import ALL_PHASES, FROM_CHECKPOINT, NO_WORKER_LOST, stalls_of

# The lines at the top of a page that say which job ran, on which machine, and when.


def job_line(job: Job) -> str:
    """Returns the job in one line: model, data, shape, schedule and redundancy."""
    pipelines = f"{counted(job.pipelines, 'pipeline')} of " if job.pipelines > 1 else ""
    per_worker = f", {job.stages_per_worker} per worker" if job.stages_per_worker > 1 else ""
    parts = [
        f"model {job.model} on data {job.data}",
        f"{pipelines}{job.cut}{per_worker}",
        f"schedule {name_of(job.schedule)}",
        f"{counted(job.microbatches, 'microbatch', 'microbatches')} of {job.microbatch_size}",
        f"redundancy {job.redundancy}",
        counted(job.steps, "step"),
        f"seed {job.seed}",
    ]
    return "Job: " + ", ".join(parts) + "."


def jobs_line(jobs: Iterable[Job]) -> str:
    """Returns the first of some jobs in one line, and the number of others."""
    lines = list(dict.fromkeys(map(job_line, jobs)))
    others = [f"{counted(len(lines) - 1, 'other job')} in other cells."] if len(lines) > 1 else []
    return " ".join([*lines[:1], *others])


def host_line(host: HostRecord) -> str:
    """Returns the machine in one line: processor, cores and versions."""
    torch = f", torch {host.torch}" if host.torch else ""
    return f"Machine: {host.cpu}, {counted(host.cores, 'core')}{torch}, Python {host.python}."


def when_text(host: HostRecord) -> str:
    """Returns the day and the local time at which a run began, such as ``22 November 2026, 14:40``."""
    began = datetime.fromisoformat(host.began)
    return f"{began.day} {began:%B %Y, %H:%M}"


# The timeline's data: columns of numbers, of which the page draws the part in view.
#
# Rules: a page holds at most `MAX_ACTIONS` single actions; steps near a recovery come first. Of every step it holds one
# bar per worker. Times are milliseconds since training began.

MAX_ACTIONS = 150_000
MAX_STEPS = 10_000
_REDUNDANT, _REPLAYED, _TAKEN_OVER = 1, 2, 4  # bits that choose the pattern of a bar


def timeline(run: RunTables) -> dict[str, Any]:
    """Returns the data from which the page draws the timeline, as values for JSON; arrays are base64 of their bytes."""
    shown = _nearest(run.actions, run.recovery)
    codes, texts = pd.factorize(shown["action"])
    origin_ns = run.origin_ns
    taken_over = _of_others(shown, run) & ~shown["redundant"]
    marks = shown["redundant"] * _REDUNDANT + shown["replayed"] * _REPLAYED + taken_over * _TAKEN_OVER
    return {
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
    is_drawn = (places % every == 0) | run.steps["step"].isin(run.actions["step"].unique())
    is_drawn |= validated & (validated.cumsum() % max(1, every // 10) == 0)
    steps = run.steps[is_drawn]
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
    slots = pd.MultiIndex.from_frame(actions[slot])
    begin_ms = pd.Series(since_ms.reindex(slots).fillna(np.inf).to_numpy(), index=actions.index)
    return (actions["start_ns"] - run.origin_ns) / 1e6 >= begin_ms


def _worker(row: Any, run: RunTables) -> dict[str, Any]:
    """Returns the line of a worker: its name, its first slots, the slots that it took over, and its end."""
    slots = [tuple(map(int, each.split("."))) for each in row.slots.split()]
    lost = run.takeovers[run.takeovers["before"] == row.worker]
    gained = run.takeovers[run.takeovers["heir"] == row.worker]
    also = []
    for (from_ms, before), rows in gained.groupby(["from_ms", "before"]):
        more = slots_text(rows[["pipeline", "stage"]].to_numpy(), run.job)
        also.append(f"from {from_ms / 1e3:.1f} s also {more} (of worker {before})")
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
    times = {name: None if pd.isna(row[name]) else row[name] for name in ("begin_ms", "resume_ms", "healed_ms")}
    if row["outcome"] in NO_WORKER_LOST:
        times["resume_ms"] = row["begin_ms"]  # nothing was interrupted
    texts = {name: str(row[name]) for name in ("what", "verdict", "who", "outcome", "last_action")}
    return times | texts | {"phases": phases, "step": None if pd.isna(row["step"]) else int(row["step"])}


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
        return ""  # all workers were restarted
    begins = [*run.recovery["begin_ms"], float("inf")]
    since = run.takeovers["from_ms"]
    takeovers = run.takeovers[(since >= begins[place]) & (since < begins[place + 1])]
    return "; ".join(
        f"worker {heir}: {slots_text(of[['pipeline', 'stage']].to_numpy(), run.job)}"
        for heir, of in takeovers.groupby("heir")
    )


def _details(row: dict[Any, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields a word, the rest of its line, and a text, for phases, throughput and bytes of a recovery."""
    for phase in ALL_PHASES:
        yield phase, "", _ms(row[f"{phase}_ms"])
    yield "pause", ", detect to replay", _ms(row["pause_ms"])
    yield "", "phases that span hosts, more or less", _ms(row["uncertain_ms"])
    speeds = [row[f"samples_per_s_{when}"] for when in ("before", "during", "after")]
    texts = ["-" if pd.isna(each) else f"{each:,.0f}" for each in speeds]
    yield "", "samples per second before, during and after", "" if pd.isna(speeds).all() else ", ".join(texts)
    yield "", "bytes sent in the plan", _megabytes(row["plan_bytes"])
    yield "", "bytes sent to heal", _megabytes(row["heal_bytes"])
    yield "", "the state came from", row["rung"]
    yield "", "last action of the lost worker", row["last_action"]
    yield "", "reason", row["reason"]


def _ms(value: float) -> str:
    return "" if pd.isna(value) else f"{value:,.1f} ms" if value >= 10 else f"{value:.3g} ms"


def _megabytes(value: Any) -> str:
    return "" if pd.isna(value) or not value else f"{value / 1e6:,.2f} MB"


# Gloo names a line of its own source before the cause, and gives general advice after it.
_OF_GLOO = re.compile(r"\[\S+\.(?:cc|h):\d+\] |\. This is typically caused by.*", re.DOTALL)


def page(run: RunTables) -> str:
    """Returns the page as HTML."""
    mood, outcome = headline(run, with_weights=False)  # the page has a line for them
    some, every = drawable(run)
    drawn, shown = timeline(some), charts(some)
    left_out = drawn["left_out"]
    data = {"timeline": drawn, "charts": shown, "colours": KIND_COLOURS, "phase_colours": PHASE_COLOURS}
    plotly, program, unpack = asset("plotly-basic.min.js"), asset("timeline.js") + asset("page.js"), asset("unpack.js")
    note = [
        *map(sentence, run.gaps),
        *([f"{left_out:,} actions of other steps are not in this page."] if left_out else []),
        *([f"The charts show one step of {every}."] if every > 1 else []),
    ]
    when = when_text(run.host) if run.host else ""
    facts = [job_line(run.job), *([host_line(run.host)] if run.host else [])]
    rows = run.recovery.to_dict("records")
    return rendered(
        "run.html",
        Heading("bamboo report", run.name, mood, outcome, _tiles(run), when, facts, _weights(run)),
        (plotly, program, unpack),
        note=" ".join(note),
        checks=_checks(run),
        exceptions=exceptions_in_words(run.raised),
        recoveries=rows and table_of(pd.DataFrame([_costs(run, place, row) for place, row in enumerate(rows)])),
        details=map(_details, rows),
        charts=shown,
        exposure=_exposed(run),
        remarks=run.remarks,
        history=table_of(_history(run)),
        workers=table_of(_workers(run)),
        command=command(run),
        data=json.dumps(finite(data), separators=(",", ":")),
        plotly=plotly,
        program=program,
        unpack=unpack,
    )


def _weights(run: RunTables) -> tuple[str, str]:
    """Returns the mood and the text of the line on the weights; a run that still trains has no such line."""
    comparison = run.judgement.comparison
    if run.judgement.proof.flaws:
        return "bad", run.judgement.weights()
    if not run.judgement.training:
        return "open", ""
    if comparison is not None and comparison.difference:
        return "bad", "Weights differ from those of the run without the fault."
    return "open" if comparison is None else "good", run.judgement.weights()


def _checks(run: RunTables) -> dict[str, Any] | None:
    if run.checks.empty:
        return None
    table = run.checks if run.checks["request"].any() else run.checks.drop(columns="request")
    return table_of(table.rename(columns={"name": "check"}))


def _tiles(run: RunTables) -> list[Tile]:
    stalls, steps = stalls_of(run.recovery), run.steps
    passed = passes(run.job, steps["step"].nunique(), run.num_samples) if run.num_samples else 0
    epochs = f"{passed:.3g} of {run.job.epochs} epochs" if run.job.epochs else f"{passed:.3g} epochs"
    of = f"of {run.job.steps}" + (f", {epochs}" if run.num_samples else "")
    tiles = [("steps committed", f"{steps['step'].nunique()}", of)]
    outcomes = run.recovery["outcome"][~run.recovery["outcome"].isin(NO_WORKER_LOST)]
    if len(outcomes):
        tiles.append(("recoveries", str((outcomes == "recovered").sum()), f"of {len(outcomes)}"))
    if stalls:
        tiles.append(_stalled(quantile(stalls, 0.5), "in the median" if len(stalls) > 1 else ""))
    tiles.append(("median step", _figure(steps["duration_ms"].median()), "ms"))
    tiles.append(("throughput", _figure(steps["samples_per_s"].median()), "samples/s"))
    tiles.append(("training loss", f"{steps['loss'].iloc[-1]:.4g}" if len(steps) else "-", ""))
    last = run.evaluations[run.evaluations["step"] == run.evaluations["step"].max()]
    for _, row in last.iterrows():
        metrics = [f"{name} {row[name]:.3g}" for name in metric_names(run) if not pd.isna(row[name])]
        tiles.append((f"{row['set']} loss", f"{row['loss']:.4g}", ", ".join(metrics)))
    return tiles


def _stalled(stall: Stall, which: str) -> Tile:
    least = str(Stall(stall.least_ns, stall.least_ns))
    most = "" if not stall.bound or stall.most_ns is None else f"at most {Stall(stall.most_ns, stall.most_ns)}"
    return "training stalled", f"\u2265 {least}" if stall.bound else least, ", ".join(filter(None, (most, which)))


def _figure(value: float) -> str:
    if pd.isna(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(ms: float) -> str:
    return "" if pd.isna(ms) else "before" if ms < 0 else f"{ms / 1e3:,.3f}"


def _history(run: RunTables) -> pd.DataFrame:
    """Returns the observations and decisions with the causes of broken transfers alone; events have the whole texts."""
    table = run.history.assign(text=run.history["text"].str.replace(_OF_GLOO, "", regex=True))
    table["at_ms"] = table["at_ms"].map(_seconds)
    return table.rename(columns={"at_ms": "at, s"})


def _workers(run: RunTables) -> pd.DataFrame:
    gained = {
        heir: slots_text(of[["pipeline", "stage"]].to_numpy(), run.job) for heir, of in run.takeovers.groupby("heir")
    }
    slots = [[list(map(int, each.split("."))) for each in text.split()] for text in run.workers["slots"]]
    of_host, of_gpu = run.workers["peak_memory_mib"], run.workers["device_mib"]
    is_on_gpu = of_gpu.notna().any()
    on_gpu = {"peak of the GPU, MiB": of_gpu, "predicted, MiB": run.workers["device_predicted_mib"]}
    return pd.DataFrame(
        {
            "worker": run.workers["worker"],
            f"{run.job.slot_noun}s": [slots_text(each, run.job) for each in slots],
            "took over": run.workers["worker"].map(gained),
            "end": run.workers["state"],
            "at, s": run.workers["end_ms"].map(_seconds),
            **(on_gpu if is_on_gpu else {"peak memory, MiB": of_host}),
            "peak stashed activations": run.workers["peak_stash"],
            "actions": run.workers["num_actions"],
            "busy, s": run.workers["busy_ms"] / 1e3,
            "last action": run.workers["last_action"],
            "pid": run.workers["pid"],
        }
    )


def _exposed(run: RunTables) -> str:
    lengths_ms = run.exposure["to_ms"] - run.exposure["from_ms"]
    exposed_ms, longest_ms = float(lengths_ms.sum()), float(lengths_ms.max())
    if not exposed_ms:
        return "Every slot had a second replica all the time."
    share = exposed_ms / run.end_ms if run.end_ms else 1.0
    total = f"Some slot had only its owner's replica for {exposed_ms / 1e3:,.2f} s, {100 * share:.1f} % of the run"
    return f"{total}; the longest time was {longest_ms / 1e3:,.2f} s."
