"""What was decided and seen in a run, in the order of time: faults, exits, suspicions, verdicts, the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from engine.report.workers import how_it_ended

Event = Mapping[str, Any]

COLUMNS = ["at_ms", "what", "epoch", "worker", "text"]


def history_table(events: Sequence[Event], origin_ns: int) -> pd.DataFrame:
    """Returns one row per decision or sign; times in milliseconds since training began."""
    rows: list[tuple[Any, ...]] = []
    epoch = 0
    first_store = next((event for event in events if event["event"] == "rendezvous"), None)  # every run begins with one
    for event in events:
        epoch = event["epoch"] if event["event"] == "epoch" else epoch
        tell = _TELLING.get(event["event"]) if event is not first_store else None
        if tell is not None:
            at_ns = event.get("seen_ns", event["at_ns"])
            rows.append(((at_ns - origin_ns) / 1e6, event["event"], epoch, event.get("of"), tell(event)))
    return pd.DataFrame(rows, columns=COLUMNS).astype({"worker": "Int64"}).sort_values("at_ms", kind="stable")


def verdict_text(event: Event) -> str:
    """Returns who is out with an epoch, and why it was made."""
    out = ", ".join(f"worker {worker} {why}" for worker, why, *_ in event["verdict"])
    return f"{out} ({event['reason']})" if out and event["reason"] not in out else out or str(event["reason"])


_TELLING: dict[str, Callable[[Event], str]] = {
    "fault": lambda event: f"injected {event['fault']}",
    "notice": lambda event: f"gave notice, {event['grace_s']:g} s",
    "stays": lambda event: str(event["text"]),
    "suspicion": lambda event: str(event["text"]),
    "exit": how_it_ended,
    "epoch": verdict_text,
    "go": lambda event: "training goes on" if event.get("epoch", 1) > 1 else "training begins",
    "interrupt": lambda event: str(event["signal"]),
    "rendezvous": lambda event: "the rendezvous store was started again",
    "store_ended": lambda event: "the coordinator's store has ended",
    "store_silent": lambda event: f"the rendezvous store (pid {event['child']}) did not answer and was killed",
    "fork_server_ended": lambda event: f"the fork server (pid {event['child']}) has ended; training needs it no more",
    "cut_short": lambda event: f"after the last commit: {event['reason']}",
    "killed": lambda event: str(event["why"]),
    "left_behind": lambda event: f"pid {event['child']} does not end by SIGKILL",
    "failed": lambda event: str(event["error"]),
    "ended": lambda event: f"{event['outcome']}, exit code {event['exit_code']}",
}
