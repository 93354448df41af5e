"""The outcome of a run in a few sentences, and the command that reproduces the run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

import pandas as pd

from engine.core.checks.recoveries import quantile
from engine.core.history.process_records import CheckRecord
from engine.core.job.job import ARGS_FIELDS, Job
from engine.core.job.samples import epoch_at
from engine.core.texts import counted, flags, numbered, sentence, trust_words
from engine.report.load import RunTables
from engine.report.tables import AFTER_END, FROM_CHECKPOINT, NO_WORKER_LOST, RESTARTED, stalls_of

Mood = Literal["good", "bad", "open"]


def headline(run: RunTables, *, with_weights: bool = True) -> tuple[Mood, str]:
    """Returns whether the run is good, and sentences about its failing checks, its outcome and its weights."""
    judged = run.judgement
    is_open = judged.exit_code is None or judged.is_interrupted or judged.is_unverified
    mood: Mood = "bad" if judged.is_red else "open" if is_open else "good"
    sentences = [judged.damage()] if judged.proof.flaws else []
    sentences += [_finding(judged.findings)] if judged.findings and mood == "bad" else []
    expected = "As expected: " if mood == "good" and judged.training == "failed" else ""
    sentences.append(f"{expected}{_training(run)}")
    if run.not_kept:
        sentences.append(sentence(run.not_kept))
    difference = judged.comparison and judged.comparison.difference  # it is the finding of a check
    if with_weights and judged.training and not difference:
        sentences.append(judged.weights())
    return mood, " ".join(sentences)


def _finding(failing: Sequence[CheckRecord]) -> str:
    first = failing[0]
    text = first.text if first.result == "failed" else f"nothing was proved: {first.text}"
    others = "one more check" if len(failing) == 2 else f"{len(failing) - 1} more checks"
    more = f" ({others} did not pass)" if len(failing) > 1 else ""
    whose = f"the request {first.request}: " if first.request else ""
    return f"{first.result.capitalize()}: {whose}{text.rstrip('.')}{more}."


def _training(run: RunTables) -> str:
    num_steps = run.job.steps
    committed = int(run.steps["step"].max()) + 1 if len(run.steps) else 0
    outcome = run.judgement.training
    if outcome == "finished":
        first = int(run.steps["step"].min()) if len(run.steps) else 0  # above 0 after a checkpoint of another run
        epochs = f" of {counted(run.job.epochs, 'epoch')}" if run.job.epochs else ""
        every = f"All steps from {first} on" if first else f"All {committed} steps{epochs}"
        steps = f"{every} were committed" if committed >= num_steps else f"{committed} steps committed"
        early = "".join(f" {sentence(text)}" for text in run.history.text[run.history.what == "stopped_early"][-1:])
        return f"{_deaths(run.recovery)} {_long_step(run)}{steps} in {run.end_ms / 1e3:.1f} s{_skipped(run)}.{early}"
    steps = f"{committed} of {num_steps} steps were committed"
    if epoch := epoch_at(run.job, committed, run.num_samples):
        steps += f", in epoch {epoch} of {run.job.epochs}"
    if outcome == "interrupted":
        return f"Interrupted: {steps}."
    if not outcome and not num_steps:
        return "No step is recorded." if run.judgement.proof.flaws else "This run has recorded nothing yet."
    if not outcome and run.goes_on:
        return f"This run is still going: {steps} so far."
    if not outcome:
        return _without_end(run, steps)
    return f"The run failed: {_cause(run)}. {sentence(steps)}"


def _without_end(run: RunTables, steps: str) -> str:
    if run.judgement.outcome:  # as a host has heard it that did not coordinate
        return f"This run has ended as {run.judgement.outcome!r}: {steps}."
    here = f" on host {run.host.node}" if run.host and run.host.node else ""
    return f"The end of this run is not recorded{here}: {steps}."


def _skipped(run: RunTables) -> str:
    """Returns the part of a sentence about steps whose gradients were not finite; empty without one."""
    num_skipped = int(run.steps["grad_norm"].isna().sum())
    return f", {num_skipped} of them without an update, because a gradient was not finite" if num_skipped else ""


def _cause(run: RunTables) -> str:
    """Returns the first clause of the error, and the lost workers unless it names workers."""
    if not run.error:
        return "no reason was recorded"
    clause = run.error.splitlines()[0].split(";")[0].rstrip(".")
    out = run.recovery[~run.recovery["outcome"].isin(["recovered", *NO_WORKER_LOST])]["who"]
    lost = sorted({who for text in out for who in text.split(", ") if who}, key=int)
    if not lost or "worker" in clause:
        return clause
    return f"{clause} ({numbered('worker', lost)} lost)"


def _deaths(recovery: pd.DataFrame) -> str:
    late = ", ".join(recovery[recovery["outcome"] == AFTER_END]["who"])
    early = ", ".join(recovery[recovery["outcome"] == RESTARTED]["who"])
    recovery = recovery[~recovery["outcome"].isin(NO_WORKER_LOST)]
    if early and recovery.empty:
        return f"{_lost(early)} before the first commit, and all workers were restarted."
    if late and recovery.empty:
        return f"{_lost(late)} after the last commit, when no step was left to recover."
    out = recovery[recovery["who"] != ""]
    stalls = stalls_of(recovery if out.empty else out)
    stall = f"training stalled for {quantile(stalls, 0.5) if stalls else 'an unknown time'}"
    if out.empty:
        return "No worker was lost." if recovery.empty else f"No worker was lost; one link was replaced; {stall}."
    longest = f" in the median, the longest time for {quantile(stalls, 1.0)}" if stalls and len(out) > 1 else ""
    again = out[out["rung"] == FROM_CHECKPOINT]
    if len(again) == len(out):
        return f"The state was lost; {_from_checkpoints(again)}; {stall}{longest}."
    if len(out) == 1:
        row = out.iloc[0]
        heirs = row["heirs"].split(", ")
        goes_on = f"{numbered('worker', heirs)} took over" if row["heirs"] else "the others continued"
        return f"{_lost(row['who'])} in step {row['step']}; {goes_on}; {stall}."
    num_lost = sum(len(who.split(", ")) for who in out["who"])
    others = "others took over" + ("" if again.empty else f"; {_from_checkpoints(again)}")
    return f"{num_lost} workers were lost; {others}; {stall}{longest}."


def _from_checkpoints(again: pd.DataFrame) -> str:
    """Returns a clause with the steps of the checkpoints; the step of a recovery is the first that is committed."""
    place = "the checkpoint" if len(again) == 1 else "the checkpoints"
    return f"training resumed from {place} of {numbered('step', [str(step - 1) for step in again['step']])}"


def _lost(who: str) -> str:
    return f"Workers {who} were lost" if "," in who else f"Worker {who} was lost"


def _long_step(run: RunTables) -> str:
    """Returns a sentence about a long standstill without a recovery, as of a worker that was stopped and went on."""
    recovered = run.recovery[~run.recovery["outcome"].isin(NO_WORKER_LOST)]["step"]
    steps = run.steps[(run.steps["step"] > 0) & ~run.steps["step"].isin(recovered)]
    usual_s, longest_s = steps["duration_ms"].median() / 1e3, steps["duration_ms"].max() / 1e3
    if not longest_s > usual_s + max(1.0, 3 * usual_s):
        return ""
    step = steps["step"][steps["duration_ms"].idxmax()]
    return f"Step {step} took {longest_s:.2f} s without the loss of a worker; a usual step took {usual_s:.2f} s. "


def command(run: RunTables) -> str:
    """Returns the command line that reproduces the run, then the scenario file or the faults that it leaves out."""
    if run.scenario:
        name, text = run.scenario.scenario, run.scenario.text
        words = ["bamboo", "inject", "--scenario", name, "--seed", str(run.scenario.seed)]
        words += flags("--set", run.scenario.settings)
        words += trust_words(run.scenario.needs_trust)
        return f"{shlex.join(words)}\n\n# {name}{'' if name.endswith('.yaml') else '.yaml'}\n{text}"
    words = ["bamboo", "run"]
    for field in fields(Job):
        value = getattr(run.job, field.name)
        default = {} if field.name in ARGS_FIELDS else field.default
        if field.name not in _PLACES and value != default:
            words += _flags(field.name, value)
    kills = [fault for fault in run.faults if ":" in fault]  # no other id has one
    words += flags("--kill", kills)
    others = [fault for fault in run.faults if fault not in kills]
    note = f"\n# without the faults of `bamboo inject --run`: {', '.join(others)}" if others else ""
    return shlex.join(words) + note


_PLACES = {"results", "name"}


def _flags(name: str, value: Any) -> list[str]:
    if name in ARGS_FIELDS:
        return flags("--set", (f"{name}.{key}={each}" for key, each in value.items()))
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{name.replace('_', '-')}"]
    return [f"--{name.replace('_', '-')}", str(value)]
