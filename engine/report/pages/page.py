"""The page of a run; its heading states the outcome.

Rule: every text from outside is escaped, for HTML and for Plotly.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from string import Template

import pandas as pd

from engine.core.checks.stall import Stall, quantile
from engine.core.samples.ledger import passes
from engine.core.texts import sentence
from engine.report.headline import command, headline
from engine.report.load import RunTables
from engine.report.pages.charts import KIND_COLOURS, PHASE_COLOURS, charts, metric_names
from engine.report.pages.exceptions_section import exceptions_section
from engine.report.pages.frame import Heading, Tile, asset, framed, html_table
from engine.report.pages.job_facts import host_line, job_line, when_text
from engine.report.pages.recoveries import recoveries_section
from engine.report.pages.timeline import drawable, slots_text, timeline
from engine.report.pages.words import definition
from engine.report.recovery import NO_WORKER_LOST, stalls_of

# Gloo names a line of its own source before the cause, and gives general advice after it.
_OF_GLOO = re.compile(r"\[\S+\.(?:cc|h):\d+\] |\. This is typically caused by.*", re.DOTALL)


def page(run: RunTables) -> str:
    """Returns the page as HTML."""
    mood, outcome = headline(run, with_weights=False)  # the page has a line for them
    some, every = drawable(run)
    drawn, shown = timeline(some), charts(some)
    left_out = drawn["left_out"]
    data = {"timeline": drawn, "charts": shown, "colours": KIND_COLOURS, "phase_colours": PHASE_COLOURS}
    sections = Template(asset("run.html")).substitute(
        checks=_checks(run),
        exceptions=exceptions_section(run.raised),
        recovery=recoveries_section(run),
        exposed=html.escape(definition("exposure")),
        exposure=html.escape(_exposed(run)),
        memory=(_section("memory") if "memory" in shown else "")
        + (_section("gpu", "Memory of the GPUs") if "gpu" in shown else ""),
        metrics=_section("metrics") if "metrics" in shown else "",
        remarks=_listed("Remarks", run.remarks),
        history=html_table(_history(run)),
        workers=html_table(_workers(run)),
        command=html.escape(command(run)),
    )
    note = " ".join(
        [
            *map(sentence, run.gaps),
            *([f"{left_out:,} actions of other steps are not in this page."] if left_out else []),
            *([f"The charts show one step of {every}."] if every > 1 else []),
        ]
    )
    when = when_text(run.host) if run.host else ""
    facts = [job_line(run.job), *([host_line(run.host)] if run.host else [])]
    heading = Heading("bamboo report", run.name, mood, outcome, _tiles(run), note, when, facts, _weights(run))
    return framed(heading, sections, data)


def _section(chart: str, title: str = "") -> str:
    return f'<section><h2>{title or chart.capitalize()}</h2><div id="{chart}" class="chart"></div></section>'


def _listed(title: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(each)}</li>" for each in sentences)
    return f"<section><h2>{title}</h2><ul>{items}</ul></section>" if items else ""


def _weights(run: RunTables) -> tuple[str, str]:
    """Returns the mood and the text of the line on the weights; a run that still trains has no such line."""
    found = run.judgement.comparison
    if run.judgement.proof.flaws:
        return "bad", run.judgement.weights()
    if not run.judgement.training:
        return "open", ""
    if found is not None and found.difference:
        return "bad", "Weights differ from those of the run without the fault."
    return "open" if found is None else "good", run.judgement.weights()


def _checks(run: RunTables) -> str:
    if run.checks.empty:
        return ""
    table = run.checks if run.checks["request"].any() else run.checks.drop(columns="request")
    return f"<section><h2>Checks</h2>{html_table(table.rename(columns={'name': 'check'}))}</section>"


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
