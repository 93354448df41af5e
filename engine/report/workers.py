"""The table of workers: what each owned at first, what it did, and how it ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from engine.report.actions import KINDS

Event = Mapping[str, Any]

TRANSFER = KINDS.index("transfer, waiting")
_COLUMNS = ["worker", "pid", "slots", "state", "code", "seen_ns", "peak_memory_mib", "peak_stash"]


def workers_table(events: Sequence[Event], actions: pd.DataFrame, origin_ns: int) -> pd.DataFrame:
    """Returns one row per worker; times in milliseconds since training began, memory in MiB."""
    rows: dict[int, dict[str, Any]] = {}
    for event in events:
        match event["event"]:
            case "started":
                slots = " ".join(f"{pipeline}.{stage}" for pipeline, stage in event["slots"])
                rows[event["of"]] = {"worker": event["of"], "pid": event["child"], "slots": slots, "state": "running"}
            case "finished" if event["of"] in rows:
                rows[event["of"]]["state"] = "finished"
                rows[event["of"]]["peak_memory_mib"] = event["peak_memory_kib"] / 1024
                rows[event["of"]]["peak_stash"] = max((peak for *_, peak in event["peak_stash"]), default=0)
            case "exit" if event["of"] in rows:
                told = rows[event["of"]]["state"] == "finished" and event["expected"]
                state = "finished" if told else how_it_ended(event)
                rows[event["of"]] |= {"state": state, "code": event["code"], "seen_ns": event["seen_ns"]}
    table = pd.DataFrame([rows[worker] for worker in sorted(rows)], columns=_COLUMNS)
    table.insert(5, "end_ms", (table.pop("seen_ns").astype("float64") - origin_ns) / 1e6)
    table = table.astype({"code": "Int64", "peak_memory_mib": "float64", "peak_stash": "Int64"})
    busy = actions[actions["kind"] != TRANSFER].assign(busy_ms=(actions["end_ns"] - actions["start_ns"]) / 1e6)
    table["num_actions"] = table["worker"].map(actions.groupby("worker").size()).fillna(0).astype("int64")
    table["busy_ms"] = table["worker"].map(busy.groupby("worker")["busy_ms"].sum()).fillna(0.0)
    last = actions.sort_values("end_ns").groupby("worker").tail(1).set_index("worker")["action"]
    table["last_action"] = table["worker"].map(last)
    return table


def how_it_ended(exit_event: Event) -> str:
    """Returns ``stopped`` for an end that was expected, else ``SIGKILL`` or ``exit code 3``."""
    code = exit_event["code"]
    if exit_event["expected"]:
        return "stopped"
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"
