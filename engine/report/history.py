"""The observations and decisions of a run in the order of time: faults, exits, suspicions, verdicts, the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from engine.core.exclusion import in_words
from engine.core.history.process_records import ExitRecord
from engine.core.history.record import StampedRecord, kind_of
from engine.core.history.record_lines import RECORDS
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import EpochRecord
from engine.report.workers import how_it_ended

COLUMNS = ["at_ms", "what", "epoch", "worker", "text"]


def history_table(history: RunHistory) -> pd.DataFrame:
    """Returns one row per observation or decision; times in milliseconds since training began."""
    rows: list[tuple[Any, ...]] = []
    for epoch, record in history.in_epochs(*(RECORDS[kind] for kind in _TELLING)):
        if isinstance(record, StampedRecord):
            at_ns = record.seen_ns if isinstance(record, ExitRecord) else record.at_ns
            kind, worker = kind_of(type(record)), getattr(record, "of", None)
            rows.append(((at_ns - history.begin_ns) / 1e6, kind, epoch, worker, _TELLING[kind](record)))
    return pd.DataFrame(rows, columns=COLUMNS).astype({"worker": "Int64"}).sort_values("at_ms", kind="stable")


def verdict_text(epoch: EpochRecord) -> str:
    """Returns the workers that an epoch excludes, and the reason of the epoch; reports have their last actions."""
    out = "; ".join(f"worker {each.worker} {each.how}" for each in epoch.verdict)
    return f"{out} ({epoch.reason})" if out and epoch.reason not in in_words(epoch.verdict) else out or epoch.reason


_TELLING: dict[str, Callable[[Any], str]] = {
    "fault": lambda record: f"injected {record.fault}",
    "notice": lambda record: f"gave notice, {record.grace_s:g} s",
    "pace": lambda record: f"after step {record.step}: {record.why}",
    "policy": lambda record: f"{record.asked}: {record.why}",
    "deadly": lambda record: str(record.text),
    "cramped": lambda record: str(record.why or "has memory for a slot, and may join"),
    "way_out": lambda record: str(record.text),
    "stays": lambda record: str(record.text),
    "suspicion": lambda record: str(record.text),
    "raised": lambda record: str(record.exception.in_step(record.step)),
    "exit": how_it_ended,
    "epoch": verdict_text,
    "go": lambda record: "training goes on" if record.epoch > 1 else "training begins",
    "interrupt": lambda record: str(record.signal),
    "store_ended": lambda record: "the coordinator's store has ended",
    "unproven": lambda record: f"worker {record.peer} {record.text}; the group is formed again",
    "fork_server_ended": lambda record: f"the fork server (pid {record.child}) has ended; training needs it no more",
    "coordinator_ended": lambda record: f"the coordinator (pid {record.child}) has ended; another one takes over",
    "cut_short": lambda record: f"after the last commit: {record.reason}",
    "restart": lambda record: f"{record.reason}; all workers are started again",
    "killed": lambda record: str(record.why),
    "left_behind": lambda record: f"pid {record.child} does not end by SIGKILL",
    "failed": lambda record: str(record.error),
    "training_ended": lambda record: f"training: {record.outcome}, exit code {record.exit_code}",
    "comparing": lambda record: "comparing with the twin",
    "comparison": lambda record: str(record.as_told),
    "not_compared": str,
    "verdict": lambda record: f"{record.result}, {record.request or 'the run'}",
    "ended": lambda record: f"{record.outcome}, exit code {record.exit_code}",
}
