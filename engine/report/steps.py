"""The table of committed steps, one row each; a step that was lost and done again has two.

Rules: a step lasts from the commit before it to its own, the first one from the beginning of training. Times are
milliseconds since training began, throughput is samples per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

Event = Mapping[str, Any]


def begin_ns(events: Sequence[Event]) -> int:
    """Returns when training began; where it never did, the time of the first event; 0 without any."""
    gos = (event["at_ns"] for event in events if event["event"] == "go")
    stamps = (event["at_ns"] for event in events if "at_ns" in event)
    return next(gos, None) or next(stamps, 0)


def samples_per_step(job: Mapping[str, Any]) -> int:
    """Returns the samples of one optimizer step, over all pipelines."""
    return int(job.get("pipelines", 1) * job.get("microbatches", 1) * job.get("microbatch_size", 1))


def steps_table(events: Sequence[Event], job: Mapping[str, Any]) -> pd.DataFrame:
    """Returns step, epoch, time of commit, duration, losses, gradient norm and throughput of each commit."""
    rows: list[tuple[Any, ...]] = []
    validation: dict[int, float] = {}
    epoch, origin_ns = 0, begin_ns(events)
    for event in events:
        match event["event"]:
            case "epoch":
                epoch = event["epoch"]
            case "commit":
                rows.append((event["step"], epoch, event["at_ns"], event.get("loss"), event.get("grad_norm")))
            case "validation":
                validation[event["step"]] = event["loss"]
    table = pd.DataFrame(rows, columns=["step", "epoch", "at_ns", "loss", "grad_norm"])
    table = table.astype(
        {"step": "int64", "epoch": "int64", "at_ns": "int64", "loss": "float64", "grad_norm": "float64"}
    )
    before_ns = table["at_ns"].shift(fill_value=origin_ns)
    duration_ms = (table["at_ns"] - before_ns) / 1e6
    table.insert(2, "commit_ms", (table["at_ns"] - origin_ns) / 1e6)
    table.insert(3, "duration_ms", duration_ms)
    table["validation_loss"] = table["step"].map(validation).astype("float64")
    table["samples_per_s"] = samples_per_step(job) / (duration_ms.where(duration_ms > 0, np.nan) / 1e3)
    return table.drop(columns="at_ns")
