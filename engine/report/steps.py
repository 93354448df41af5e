"""The table of commits, one row each, and the ledger of samples; a step that was lost and redone has two commits.

Rules: a step lasts from the previous commit to its own; the first step lasts from the beginning of training. Times are
milliseconds since training began, throughput is samples per second.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from engine.core.config.job import Job
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ValidationRecord
from engine.core.samples.ledger import first_position, samples_per_step, shares

_LEDGER = ["step", "pipeline", "microbatch", "data_epoch", "first", "count"]


def steps_table(history: RunHistory) -> pd.DataFrame:
    """Returns step, epoch, time of commit, duration, losses, gradient norm and throughput of each commit.

    A step that was skipped has no gradient norm.
    """
    commits = history.commits
    validated = history.of(ValidationRecord)
    origin_ns = history.begin_ns
    table = pd.DataFrame(
        {
            "step": np.array(commits.steps),
            "epoch": np.array(commits.epochs),
            "at_ns": np.array(commits.at_ns),
            "loss": np.array(commits.losses),
            "grad_norm": np.where(np.array(commits.grad_norms) < 0, np.nan, np.array(commits.grad_norms)),
        }
    )
    before_ns = table["at_ns"].shift(fill_value=origin_ns)
    duration_ms = (table["at_ns"] - before_ns) / 1e6
    table.insert(2, "commit_ms", (table["at_ns"] - origin_ns) / 1e6)
    table.insert(3, "duration_ms", duration_ms)
    firsts = {each.step: each for each in reversed(validated)}  # the first evaluation set of a step
    table["validation_loss"] = table["step"].map({step: each.loss for step, each in firsts.items()}).astype("float64")
    metrics = {step: next(iter(each.metrics.values())) for step, each in firsts.items() if each.metrics}
    table["validation_metric"] = table["step"].map(metrics).astype("float64")
    table["samples_per_s"] = samples_per_step(history.job) / (duration_ms.where(duration_ms > 0, np.nan) / 1e3)
    return table.drop(columns="at_ns")


def evaluations_table(history: RunHistory) -> pd.DataFrame:
    """Returns one row per evaluation set of a validation pass: its samples, its loss, and a column for each metric."""
    rows = {
        (each.step, each.name): {"step": each.step, "set": each.name, "samples": each.samples, "loss": each.loss}
        | dict(each.metrics)
        for each in history.of(ValidationRecord)
    }  # a step that was redone has its last result
    kinds = {"step": "int64", "set": object, "samples": "int64", "loss": "float64"}
    return pd.DataFrame([*rows.values()], columns=None if rows else list(kinds)).astype(kinds)


def samples_table(job: Job, steps: Iterable[int], num_samples: int) -> pd.DataFrame:
    """Returns one row per microbatch and pass over the training set; none for data without limit.

    `first` is the place of the first sample in the order of the pass, which `engine.core.samples.ledger` tells.
    """
    rows = [
        (step, pipeline, microbatch, *share)
        for step in (sorted(set(steps)) if num_samples else ())
        for pipeline in range(job.pipelines)
        for microbatch in range(job.microbatches)
        for share in shares(first_position(job, step, pipeline, microbatch), job.microbatch_size, num_samples)
    ]
    return pd.DataFrame(rows, columns=_LEDGER, dtype="int64")
