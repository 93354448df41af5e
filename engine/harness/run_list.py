"""The runs in a folder of results, each in one row, from the beginning and the end of its events."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import StorageError
from engine.core.history.run_history import RunHistory, history_of
from engine.core.history.verdict_records import ComparisonRecord, NotComparedRecord
from engine.files.atomic_write import open_to_read
from engine.files.events_file import events_of
from engine.files.run_folder import RunFolder, refuse_size, run_names, started_at
from engine.harness.dead_runs import dead_run

_END_BYTES = 131_072  # of the events: the records of the end and of the last step stand in them


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run: `outcome` and `verdict` in words, `steps` committed of `num_steps`, the time of its start."""

    name: str
    started: str
    outcome: str
    verdict: str
    model: str = ""
    pipelines: int = 0
    stages: int = 0
    blocks: int = 1
    steps: int = 0
    num_steps: int = 0


def run_rows(results: Path) -> list[RunRow]:
    """Returns the runs in a folder of results, the newest first."""
    return [_row(results / name) for name in reversed(run_names(results))]


def _row(run: Path) -> RunRow:
    try:
        started = started_at(run.name).isoformat(" ")
    except ValueError:
        started = ""  # such as month 13: a folder of the user
    try:
        history = _ends(RunFolder(run).events)
    except StorageError:
        return RunRow(run.name, started, "unknown", "events cannot be read: bamboo report says why")
    if history.is_empty:
        return RunRow(run.name, started, _unfinished(run), "nothing recorded yet")
    job = history.job
    outcome = history.ended.outcome if history.ended else _unfinished(run)
    shape = job.model, job.pipelines, job.stages, job.blocks
    return RunRow(run.name, started, outcome, _verdict(history), *shape, history.committed + 1, job.steps)


def _verdict(history: RunHistory) -> str:
    """Returns the first check that did not pass, else the error, else the weights; empty before the verdict."""
    if history.findings:
        return f"{history.findings[0].name} {history.findings[0].result}"
    if history.error and history.ended and history.ended.exit_code:
        return history.error.splitlines()[0]
    found = history.first(ComparisonRecord)
    if found is not None and found.difference is None:
        return found.as_told
    return str(history.first(NotComparedRecord) or "")


def _unfinished(run: Path) -> str:
    with dead_run(run) as is_dead:
        return "launcher gone" if is_dead else "running"


def _ends(events: Path) -> RunHistory:
    """Returns the history of the first record and of the last ones; empty without events.

    Raises:
        StorageError: the events cannot be read, or are of another version.
    """
    try:
        with open(open_to_read(events), "rb") as file:
            refuse_size(events, os.fstat(file.fileno()))
            first = file.readline(_END_BYTES)
            begin = max(len(first), os.fstat(file.fileno()).st_size - _END_BYTES)
            file.seek(begin)
            if begin > len(first):
                file.readline()  # the rest of a line
            last = file.read()
    except FileNotFoundError:
        return RunHistory()
    except OSError as error:
        raise StorageError(f"{events}: {error.strerror}") from error
    return history_of(events_of(first + last, events))
