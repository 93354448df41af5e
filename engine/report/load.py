"""Reads the events of a run into tables.

The public entry for those who work with the tables themselves:

    from pathlib import Path
    from engine.files.events_file import read_events
    from engine.report.load import load
    run = load(read_events(Path("results/latest/events.jsonl")))
    run.recovery, run.steps, run.workers, run.actions   # pandas data frames

Rule: nothing but the events is asked, so whatever else lies in a run folder can be deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from engine.report.actions import actions_table
from engine.report.exposure import exposure_table
from engine.report.history import history_table
from engine.report.recovery import recovery_table
from engine.report.steps import begin_ns, steps_table
from engine.report.workers import workers_table

TABLES = ("recovery", "steps", "workers", "actions")


@dataclass(frozen=True, slots=True, eq=False)
class RunTables:
    """One run as tables; `job` are the fields of its job, `outcome` is empty while it goes on.

    Times that end with ``_ms`` count from `origin_ns`, when training began; those with ``_ns`` are the host's clock.
    """

    name: str
    job: Mapping[str, Any]
    outcome: str
    error: str
    origin_ns: int
    end_ms: float
    faults: tuple[str, ...]
    recovery: pd.DataFrame
    steps: pd.DataFrame
    workers: pd.DataFrame
    actions: pd.DataFrame
    history: pd.DataFrame
    exposure: pd.DataFrame
    twin_loss: Mapping[int, float]  # by step; empty where no twin was looked at
    scenario: Mapping[str, Any]  # what `bamboo inject` ran, or nothing

    def table(self, name: str) -> pd.DataFrame:
        """Returns the table of that name, one of `TABLES`, with the name of the run in front."""
        table: pd.DataFrame = getattr(self, name).copy()
        table.insert(0, "run", self.name)
        return table


def load(events: Iterable[Mapping[str, Any]], name: str = "") -> RunTables:
    """Returns the tables of a run, from its events in the order of the file."""
    events = list(events)
    job, ended, failed = (_first(events, kind) for kind in ("job", "ended", "failed"))
    origin_ns = begin_ns(events)
    steps = steps_table(events, job)
    actions = actions_table(events, int(job.get("stages", 1)))
    recovery = recovery_table(events, job, actions, steps, origin_ns)
    stamps = [event.get("at_ns", event.get("end_ns", origin_ns)) for event in events]
    end_ms = max(0.0, (max(stamps, default=origin_ns) - origin_ns) / 1e6)
    return RunTables(
        name,
        job,
        str(ended.get("outcome", "")),
        str(failed.get("error", "")),
        origin_ns,
        end_ms,
        tuple(dict.fromkeys(str(event["fault"]) for event in events if event["event"] == "fault")),
        recovery,
        steps,
        workers_table(events, actions, origin_ns),
        actions,
        history_table(events, origin_ns),
        exposure_table(job, recovery, end_ms),
        dict(_first(events, "twin").get("losses", ())),
        _first(events, "scenario"),
    )


def _first(events: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    return next((event for event in events if event["event"] == kind), {})


def joined(runs: Sequence[RunTables], name: str) -> pd.DataFrame:
    """Returns one of the `TABLES` over several runs, at least one, with the name of the run in front."""
    return pd.concat([run.table(name) for run in runs], ignore_index=True)
