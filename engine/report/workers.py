"""The table of workers: the first slots of each, its work and its end."""

from __future__ import annotations

import signal
from typing import Any

import pandas as pd

from engine.core.history.process_records import ExitRecord, StartedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import FinishedRecord, RaisedRecord
from engine.report.actions import KINDS

TRANSFER = KINDS.index("transfer, waiting")
_COLUMNS = ["worker", "pid", "slots", "state", "code", "seen_ns", "peak_memory_mib", "peak_stash"]


def workers_table(history: RunHistory, actions: pd.DataFrame, origin_ns: int) -> pd.DataFrame:
    """Returns one row per worker; times in milliseconds since training began, memory in MiB."""
    rows: dict[int, dict[str, Any]] = {}
    for each in history.of(StartedRecord):
        slots = " ".join(f"{pipeline}.{stage}" for pipeline, stage in each.slots)
        rows[each.of] = {"worker": each.of, "pid": each.child, "slots": slots, "state": "running"}
    for done in history.of(FinishedRecord):
        peak_stash = max((peak for *_, peak in done.peak_stash), default=0)
        rows[done.of] |= {"peak_memory_mib": done.peak_memory_kib / 1024, "peak_stash": peak_stash, "state": "finished"}
    raised = {each.of: f"raised {each.error.partition(':')[0]}" for each in history.of(RaisedRecord)}
    for end in history.of(ExitRecord):
        told = rows[end.of]["state"] == "finished" and end.expected
        state = "finished" if told else raised.get(end.of) or how_it_ended(end)
        rows[end.of] |= {"state": state, "code": end.code, "seen_ns": end.seen_ns}
    table = pd.DataFrame([rows[worker] for worker in sorted(rows)], columns=_COLUMNS)
    table.insert(5, "end_ms", (table.pop("seen_ns").astype("float64") - origin_ns) / 1e6)
    table = table.astype({"code": "Int64", "peak_memory_mib": "float64", "peak_stash": "Int64"})
    busy = actions[actions["kind"] != TRANSFER].assign(busy_ms=(actions["end_ns"] - actions["start_ns"]) / 1e6)
    table["num_actions"] = table["worker"].map(actions.groupby("worker").size()).fillna(0).astype("int64")
    table["busy_ms"] = table["worker"].map(busy.groupby("worker")["busy_ms"].sum()).fillna(0.0)
    last = actions.sort_values("end_ns").groupby("worker").tail(1).set_index("worker")["action"]
    table["last_action"] = table["worker"].map(last)
    return table


def how_it_ended(end: ExitRecord) -> str:
    """Returns ``stopped`` for an end that was expected, else ``SIGKILL`` or ``exit code 3``."""
    code = end.code
    if end.expected:
        return "stopped"
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"
