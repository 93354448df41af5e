"""Two runs side by side: quantiles of each figure, the ratio of the medians, and a verdict: slower, faster or same.

Rules: B is compared with A. A figure is slower, or faster, if the ratio of the medians lies outside of `SAME` and the
95 % intervals of the medians do not overlap. With fewer than `FEWEST` values on a side there is no verdict.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from engine.core.config.job import Job
from engine.report.load import RunTables
from engine.report.recovery import PHASE_COLUMNS

SAME = (0.95, 1.05)
FEWEST = 5
COLUMNS = ["figure", "a_n", "b_n", "a_p50", "b_p50", "a_p95", "b_p95", "ratio", "verdict"]


def compare(a: RunTables, b: RunTables) -> pd.DataFrame:
    """Returns one row per figure that both runs have, in milliseconds; the figure that slowed down most comes first."""
    ours, theirs = _figures(a), _figures(b)
    rows = [_row(name, ours[name], theirs[name]) for name in ours if name in theirs]
    return pd.DataFrame(rows, columns=COLUMNS).sort_values("ratio", ascending=False, ignore_index=True)


def different_fields(a: Job, b: Job) -> dict[str, tuple[Any, Any]]:
    """Returns the values of each field, or argument, in which two jobs differ; the name and the folder do not count."""
    ours, theirs = _flat(a), _flat(b)
    names = [name for name in {**ours, **theirs} if name not in ("name", "results")]
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


def _flat(job: Job) -> dict[str, Any]:
    """Returns the fields of a job, with each argument as a field such as ``model_args.width``."""
    found: dict[str, Any] = {}
    for name, value in asdict(job).items():
        found |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _figures(run: RunTables) -> dict[str, np.ndarray]:
    found = {"step": run.steps["duration_ms"].iloc[1:]}  # without the first step, which warms up
    for column in ("stall_ms", *PHASE_COLUMNS, "pause_ms"):
        found[f"recovery: {column.removesuffix('_ms')}"] = run.recovery[column]
    lengths_ms = (run.actions["end_ns"] - run.actions["start_ns"]) / 1e6
    for op, each in lengths_ms.groupby(run.actions["op"]):
        found[f"action {op}"] = each
    values = {name: series.dropna().to_numpy(dtype="float64") for name, series in found.items()}
    return {name: each for name, each in values.items() if len(each)}


def _row(name: str, a: np.ndarray, b: np.ndarray) -> tuple[str | int | float, ...]:
    a50, b50 = float(np.median(a)), float(np.median(b))
    ratio = b50 / a50 if a50 else float("nan")
    p95 = float(np.quantile(a, 0.95)), float(np.quantile(b, 0.95))
    return name, len(a), len(b), a50, b50, *p95, ratio, _verdict(a, b, ratio)


def _verdict(a: np.ndarray, b: np.ndarray, ratio: float) -> str:
    if min(len(a), len(b)) < FEWEST or np.isnan(ratio):
        return "too few"
    if SAME[0] <= ratio <= SAME[1]:
        return "same"
    (a_low, a_high), (b_low, b_high) = _median_interval(a), _median_interval(b)
    if a_high < b_low:
        return "slower"
    return "faster" if b_high < a_low else "same"


def _median_interval(values: np.ndarray) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the median, by ranks of the binomial distribution."""
    ordered, half_width = np.sort(values), 0.98 * np.sqrt(len(values))
    low = max(0, int(np.floor(len(values) / 2 - half_width)))
    return float(ordered[low]), float(ordered[len(values) - 1 - low])
