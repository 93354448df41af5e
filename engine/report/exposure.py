"""The exposure window: the time in which some slot had no live replica but its owner's.

Rules: with shadows, a job is exposed from the first sign of a failure until the new shadows are whole, or to its end.
Where nobody shadows and there is one pipeline only, it is exposed all the time. Times are milliseconds since training
began.
"""

from __future__ import annotations

import pandas as pd

from engine.core.config.job import Job
from engine.report.recovery import NOBODY_LOST

COLUMNS = ["from_ms", "to_ms"]


def exposure_table(job: Job, recovery: pd.DataFrame, end_ms: float) -> pd.DataFrame:
    """Returns the intervals of exposure, none touching another."""
    shadowed = job.redundancy != "none" and job.pipelines * job.stages > 1
    if not shadowed and job.pipelines == 1:
        return pd.DataFrame([(0.0, end_ms)], columns=COLUMNS)
    intervals: list[tuple[float, float]] = []
    for row in recovery[(recovery["who"] != "") & ~recovery["outcome"].isin(NOBODY_LOST)].itertuples():
        until_ms = end_ms if pd.isna(row.healed_ms) else row.healed_ms
        if intervals and row.begin_ms <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], until_ms))
        else:
            intervals.append((row.begin_ms, until_ms))
    return pd.DataFrame(intervals, columns=COLUMNS, dtype="float64")
