"""The runs in a folder of results, each in one row, from the beginning and the end of its events."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from engine.core.errors import StorageError
from engine.core.history.run_history import RunHistory, history_of
from engine.core.history.verdict_records import ComparisonRecord, NotComparedRecord
from engine.files.events_file import events_of
from engine.files.run_folder import RunFolder, run_names
from engine.harness.dead_runs import dead_run

_END_BYTES = 131_072  # of the events: the records of the end and of the last step stand in them
_ACTION = b'"event":"action"'  # most of the lines, and none of the facts in a row


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run: `outcome` and `verdict` in words, `steps` committed of `num_steps`, the time of its start."""

    name: str
    model: str
    pipelines: int
    stages: int
    outcome: str
    verdict: str
    steps: int
    num_steps: int
    started: str


def run_rows(results: Path) -> list[RunRow]:
    """Returns the runs in a folder of results, the newest first."""
    return [_row(results / name) for name in reversed(run_names(results))]


def _row(run: Path) -> RunRow:
    started = datetime.strptime(run.name[:15], "%Y%m%d-%H%M%S").isoformat(" ")
    try:
        history = _ends(RunFolder(run).events)
    except StorageError:
        return RunRow(run.name, "", 0, 0, "unknown", "events cannot be read: bamboo report says why", 0, 0, started)
    if not history.records:
        return RunRow(run.name, "", 0, 0, _unfinished(run), "nothing recorded yet", 0, 0, started)
    job = history.job
    ended = history.training_ended or history.ended
    outcome = ended.outcome if ended and history.ended else _unfinished(run)
    steps = history.committed + 1
    return RunRow(run.name, job.model, job.pipelines, job.stages, outcome, _verdict(history), steps, job.steps, started)


def _verdict(history: RunHistory) -> str:
    """Returns the first check that did not pass, else what became of the weights; empty before the verdict."""
    if history.findings:
        return f"{history.findings[0].name} {history.findings[0].result}"
    found = history.first(ComparisonRecord)
    if found is not None and found.difference is None:
        return f"weights identical, {found.compared} of {found.steps} steps"
    return "weights not compared" if history.first(NotComparedRecord) else ""


def _unfinished(run: Path) -> str:
    with dead_run(run) as is_dead:
        return "launcher gone" if is_dead else "running"


def _ends(events: Path) -> RunHistory:
    """Returns the history of the first record and of the last ones; empty without events.

    Raises:
        StorageError: the events cannot be read, or are of another version.
    """
    try:
        with events.open("rb") as file:
            first = file.readline()
            begin = max(len(first), events.stat().st_size - _END_BYTES)
            file.seek(begin)
            if begin > len(first):
                file.readline()  # the rest of a line
            lines = [line for line in file.read().split(b"\n") if _ACTION not in line]
    except FileNotFoundError:
        return RunHistory()
    except OSError as error:
        raise StorageError(f"{events}: {error.strerror}") from error
    return history_of(events_of(first + b"\n".join(lines), events))
