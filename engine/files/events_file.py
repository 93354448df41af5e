"""Reads events.jsonl, the record of a run from which every result is computed, and adds records to it.

Rule: a torn line, which is half of a line that a crash or a full disk left, costs itself only. The reader yields
`UnreadLine` in its place. A file whose first line is not the job's is of another version, or no file of events.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from engine.core.errors import InvariantError, StorageError
from engine.core.history.heard_decisions import HeardDecisions
from engine.core.history.process_records import StartedRecord
from engine.core.history.record import AGENT, Record, StampedRecord, UnreadLine
from engine.core.history.record_lines import (
    TornLineError,
    commit_fields,
    decoded,
    encoded,
    refuse_other_version,
    whole_end,
)
from engine.core.history.retention import marked_steps
from engine.core.history.run_history import RunHistory, history_of
from engine.core.history.step_files import span_of
from engine.files.atomic_write import open_to_append, open_to_read, storage_errors
from engine.files.step_reader import StepReader

_CHUNK_BYTES = 8_000_000
_HEARD_COMMIT = '"line":"{\\"event\\":\\"commit\\",'


def read_history(path: Path, *, every_action: bool = False) -> RunHistory:
    """Returns the history that the records of a run add up to; raises the errors of `read_events`.

    Of its actions it has those that its recoveries are timed by, or every one; `files` has all of them. A run has
    millions, and each takes a hundred times longer to read as a record than as bytes.
    """
    history, files, heard = RunHistory(), StepReader(path.parent), HeardDecisions()
    for begin, data in whole_lines(path, 0):
        _add_lines(history, data, path, begin, heard)
    marked, span = marked_steps(history.records_of_recoveries), span_of(history.job)
    near = {step - step % span for step in marked}
    actions = files.actions([each for each in files.ranges() if every_action or each in near], _pids(history))
    history.add_actions(each for each in actions if every_action or each.step in marked)
    history.files = files
    return history


def read_events(path: Path, start: int = 0, since: int = 0) -> Iterator[Record]:
    """Yields the records of a run in the order of time, with the actions of steps from `since` on between them.

    The records begin at byte `start` of the file; an unfinished last line is left out.

    Raises:
        StorageError: a file cannot be read, is no file of events, or is of another version.
    """
    history, files = history_of(recorded(path, start)), StepReader(path.parent)
    firsts = list(files.ranges())
    before = [first for first in firsts if first <= since]
    history.add_actions(files.actions(firsts[max(0, len(before) - 1) :], _pids(history), since))
    yield from history.records


def recorded(path: Path, start: int = 0) -> Iterator[Record]:
    """Yields the records of the events file from byte `start` on, no actions; raises the errors of `read_events`."""
    for begin, data in whole_lines(path, start):
        yield from events_of(data, path, begin)


def whole_lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Yields the whole lines of a file from byte `start` on, some megabytes at once, each part with its first byte.

    Raises:
        StorageError: the file cannot be read.
    """
    rest = b""
    try:
        with open(open_to_read(path), "rb") as file:  # a pipe or a device has no end
            file.seek(start)
            while data := file.read(_CHUNK_BYTES):
                data = rest + data
                end = data.rfind(b"\n") + 1
                yield start, data[:end]
                start, rest = start + end, data[end:]
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


def _pids(history: RunHistory) -> dict[int, int]:
    return {each.of: each.child for each in history.of(StartedRecord)}


def events_of(data: bytes, path: Path, start: int = 0, *, last_commits: bool = False) -> Iterator[Record]:
    """Yields the records in `data`, the bytes of `path` from `start` on; an unfinished last line is left out.

    With `last_commits` only the last of the commits in `data` is there: the others cost most of the time.

    Raises:
        StorageError: the data is no part of a file of events, or is of another version.
    """
    *lines, _ = data.decode("utf-8", "replace").split("\n")
    wanted: Sequence[int] = range(len(lines))
    if last_commits:
        last = next((number for number in reversed(wanted) if _is_commit(lines[number])), 0)
        wanted = [number for number in wanted if number == last or not _is_commit(lines[number])]
    for number in wanted:
        yield from _records_of(lines[number], number, path, start)


def _records_of(line: str, number: int, path: Path, start: int) -> Iterator[Record]:
    """Yields the record of the line of this number, from 0, behind byte `start` of a file."""
    is_first = not start and not number
    try:
        record = decoded(line)
        if is_first:
            refuse_other_version(record)
    except TornLineError as error:
        if is_first:
            raise StorageError(f"{path}:1: {error}") from error
        yield UnreadLine(number=_lines_before(path, start) + number + 1)
        yield from _salvaged(line)
    except InvariantError as error:
        raise StorageError(f"{path}:{_lines_before(path, start) + number + 1}: {error}") from error
    else:
        yield record


def _add_lines(history: RunHistory, data: bytes, path: Path, start: int, heard: HeardDecisions) -> None:
    """Adds the records in whole lines to a history; a day has a million commits, which are read many at once."""
    *lines, _ = data.decode("utf-8", "replace").split("\n")
    commits: list[tuple[str, ...]] = []
    for number, line in enumerate(lines):
        fields = commit_fields(line) if number or start else None
        if fields is not None:
            commits.append(fields)
            continue
        history.add_commits(commits)
        commits = []
        for record in _records_of(line, number, path, start):
            history.add(record)
            if (decision := heard.told(record)) is not None:
                history.add(decision)
    history.add_commits(commits)


def _is_commit(line: str) -> bool:
    """Whether a line is a commit, or one of which this host has heard."""
    if line.startswith('{"event":"heard",'):
        return _HEARD_COMMIT in line and line.endswith(('\\"last\\":false}"}', '\\"last\\":true}"}'))
    return line.startswith('{"event":"commit",') and line.endswith(('"last":false}', '"last":true}'))


def _salvaged(torn: str) -> Iterator[Record]:
    """Yields the whole record at the end of a torn line, if there is one."""
    with contextlib.suppress(InvariantError):
        if rest := whole_end(torn):
            yield decoded(rest)


def _lines_before(path: Path, start: int) -> int:
    return path.read_bytes()[:start].count(b"\n") if start else 0


def add_records(path: Path, *records: StampedRecord) -> None:
    """Appends records of the launcher, or of another command about the run, with the present time.

    Raises:
        StorageError: the file could not be written.
    """
    stamp = {"worker": AGENT, "pid": os.getpid(), "at_ns": time.monotonic_ns()}
    lines = "".join(f"{encoded(replace(each, **stamp))}\n" for each in records)
    with open(open_to_append(path), "a", encoding="utf-8") as file, storage_errors("write", path):
        file.write(lines)
