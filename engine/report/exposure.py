"""The exposure window: the time in which only its owner had a live replica of some slot.

Rules: with shadows or several pipelines, a job is exposed from the first sign of a failure until the new shadows are
complete, or until its end. One pipeline without shadows is exposed all the time. Times are milliseconds since training
began.
"""

from __future__ import annotations

import pandas as pd

from engine.core.config.job import Job
from engine.report.recovery import NO_WORKER_LOST

COLUMNS = ["from_ms", "to_ms"]


def exposure_table(job: Job, recovery: pd.DataFrame, end_ms: float) -> pd.DataFrame:
    """Returns the intervals of exposure; they do not overlap."""
    shadowed = job.redundancy != "none" and job.pipelines * job.stages > 1
    if not shadowed and job.pipelines == 1:
        return pd.DataFrame([(0.0, end_ms)], columns=COLUMNS)
    intervals: list[tuple[float, float]] = []
    for row in recovery[(recovery["who"] != "") & ~recovery["outcome"].isin(NO_WORKER_LOST)].itertuples():
        until_ms = end_ms if pd.isna(row.healed_ms) else row.healed_ms
        if intervals and row.begin_ms <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], until_ms))
        else:
            intervals.append((row.begin_ms, until_ms))
    return pd.DataFrame(intervals, columns=COLUMNS, dtype="float64")
