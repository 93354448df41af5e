"""A run in the Trace Event Format, which Perfetto and chrome://tracing open: one process per worker.

Rules: times are microseconds since training began. An arrow leads from each send to the receive of the same transfer.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from engine.report.actions import KINDS
from engine.report.load import RunTables
from engine.report.tables import ALL_PHASES

_COORDINATOR = 1_000_000  # a process number that no worker has


def trace(run: RunTables) -> dict[str, Any]:
    """Returns the trace as values for JSON."""
    events = [_named(row.worker, f"worker {row.worker} ({row.slots})") for row in run.workers.itertuples()]
    events.append(_named(_COORDINATOR, "coordinator"))
    events += [_slice(row, run.origin_ns) for row in run.actions.itertuples()]
    events += _arrows(run.actions, run.origin_ns)
    events += [_moment(row) for row in run.history.itertuples()]
    events += [phase for row in run.recovery.to_dict("records") for phase in _phases(row)]
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"run": run.name}}


def _named(number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}


def _slice(row: Any, origin_ns: int) -> dict[str, Any]:
    details = {"step": row.step, "epoch": row.epoch, "redundant": row.redundant, "replayed": row.replayed}
    return {
        "ph": "X",
        "name": row.action,
        "cat": KINDS[row.kind],
        "pid": row.worker,
        "tid": 0,
        "ts": (row.start_ns - origin_ns) / 1e3,
        "dur": (row.end_ns - row.start_ns) / 1e3,
        "args": details,
    }


def _arrows(actions: pd.DataFrame, origin_ns: int) -> list[dict[str, Any]]:
    """Returns a start and a finish for each recorded transfer; one sent again was received in the later epoch."""
    key = ["step", "epoch", "pipeline", "target", "microbatch", "direction"]
    sides = {}
    for side in ("SEND", "RECV"):
        rows = actions[actions["op"].str.startswith(side)]
        direction = rows["op"].str[-1]
        ahead = direction.map({"F": 1, "B": -1}).astype("int64") if side == "SEND" else 0
        rows = rows.assign(target=rows["stage"] + ahead, direction=direction)
        sides[side] = rows.drop_duplicates(key)[[*key, "worker", "start_ns", "end_ns"]]
    pairs = sides["SEND"].merge(sides["RECV"], on=key, suffixes=("", "_there"))
    events = []
    for number, row in enumerate(pairs.itertuples()):
        arrow = {"cat": "transfer", "name": "transfer", "id": number, "tid": 0}
        events.append({**arrow, "ph": "s", "pid": row.worker, "ts": (row.start_ns - origin_ns) / 1e3})
        end_us = (row.end_ns_there - origin_ns) / 1e3
        events.append({**arrow, "ph": "f", "bp": "e", "pid": row.worker_there, "ts": end_us})
    return events


def _moment(row: Any) -> dict[str, Any]:
    mine = row.what in ("fault", "exit", "suspicion", "notice") and not pd.isna(row.worker)
    place = {"pid": int(row.worker), "s": "p"} if mine else {"pid": _COORDINATOR, "s": "g"}
    return {"ph": "i", "name": f"{row.what}: {row.text}", "cat": "history", "tid": 0, "ts": row.at_ms * 1e3, **place}


def _phases(row: dict[Any, Any]) -> list[dict[str, Any]]:
    at_ms, events = row["begin_ms"], []
    for phase in ALL_PHASES:
        taken_ms = row[f"{phase}_ms"]
        if not pd.isna(taken_ms):
            place = {"pid": _COORDINATOR, "tid": 0, "ts": at_ms * 1e3, "dur": taken_ms * 1e3}
            events.append({"ph": "X", "name": phase, "cat": "recovery", **place, "args": {"what": row["what"]}})
            at_ms += taken_ms
    return events
