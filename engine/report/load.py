"""Reads the events of a run into tables.

The public entry for programs that use the tables:

    from pathlib import Path
    from engine.files.events_file import read_events
    from engine.report.load import load
    run = load(read_events(Path("results/latest/events.jsonl")))
    run.recovery, run.steps, run.workers, run.actions   # pandas data frames

Rule: tables come from the events alone, so all other files of a run folder can be deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from engine.core.config.job import Job
from engine.core.history.gaps import gaps
from engine.core.history.process_records import HostRecord
from engine.core.history.record import Record, StampedRecord
from engine.core.history.run_history import RunHistory, history_of
from engine.core.history.run_records import ActionRecord, FaultRecord, RaisedRecord, ScenarioRecord
from engine.core.history.verdict_records import TwinRecord
from engine.report.actions import actions_table
from engine.report.exposure import exposure_table
from engine.report.history import history_table
from engine.report.judgement import Judgement, checks_table, judgement_of, outcome_table
from engine.report.recovery import recovery_table
from engine.report.steps import steps_table
from engine.report.workers import takeovers_table, workers_table

TABLES = ("recovery", "steps", "workers", "actions", "checks", "outcome")


@dataclass(frozen=True, slots=True, eq=False)
class RunTables:
    """One run as tables.

    A time ``_ms`` counts from `origin_ns`, when training began; a time ``_ns`` is of the host's monotonic clock.
    """

    name: str
    job: Job
    judgement: Judgement
    error: str
    origin_ns: int
    end_ms: float
    faults: tuple[str, ...]
    recovery: pd.DataFrame
    steps: pd.DataFrame
    workers: pd.DataFrame
    actions: pd.DataFrame
    checks: pd.DataFrame
    outcome: pd.DataFrame
    history: pd.DataFrame
    exposure: pd.DataFrame
    takeovers: pd.DataFrame
    twin_loss: Mapping[int, float]  # by step; empty if the run was not compared with a twin
    scenario: ScenarioRecord | None  # of `bamboo inject`
    raised: tuple[RaisedRecord, ...]  # the exceptions that ended workers, in the order of time
    host: HostRecord | None  # None if the run was not started by a command
    gaps: tuple[str, ...] = ()  # the parts of the record that are missing, in sentences

    def table(self, name: str) -> pd.DataFrame:
        """Returns the table of a name in `TABLES`, with the name of the run as first column."""
        table: pd.DataFrame = getattr(self, name).copy()
        table.insert(0, "run", self.name)
        return table


def load(records: Iterable[Record], name: str = "") -> RunTables:
    """Returns the tables of a run, from its records in the order of the file."""
    history = history_of(records)
    origin_ns = history.begin_ns
    steps = steps_table(history)
    actions = actions_table(history)
    recovery = recovery_table(history, actions, steps)
    stamps = [each.at_ns for each in _until_training_ended(history) if isinstance(each, StampedRecord)]
    stamps += [each.end_ns for each in history.of(ActionRecord)]
    twin, judgement = history.first(TwinRecord), judgement_of(history)
    end_ms = max(0.0, (max(stamps, default=origin_ns) - origin_ns) / 1e6)
    return RunTables(
        name,
        history.job,
        judgement,
        history.error,
        origin_ns,
        end_ms,
        tuple(dict.fromkeys(each.fault for each in history.of(FaultRecord))),
        recovery,
        steps,
        workers_table(history, actions, origin_ns),
        actions,
        checks_table(judgement),
        outcome_table(judgement),
        history_table(history),
        exposure_table(history.job, recovery, end_ms),
        takeovers_table(history),
        dict(twin.losses) if twin else {},
        history.first(ScenarioRecord),
        tuple(history.of(RaisedRecord)),
        history.first(HostRecord),
        gaps(history),
    )


def _until_training_ended(history: RunHistory) -> list[Record]:
    """Returns the records of training: the time of the twin and of the checks is not part of the run."""
    end = history.training_ended
    return history.records if end is None else history.records[: history.records.index(end) + 1]


def joined(runs: Sequence[RunTables], name: str) -> pd.DataFrame:
    """Returns one of the `TABLES` over one or more runs, with the name of the run as first column."""
    return pd.concat([run.table(name) for run in runs], ignore_index=True)
