"""Reads events.jsonl, the record of a run from which every result is computed.

Rule: a torn line, which is half of a line that a crash or a full disk left, costs itself only. The reader yields
`UnreadLine` in its place. A file whose first line is not the job's is of another version, or no file of events. What
lies in it may be from elsewhere, so the length of lines and the number of unread ones have bounds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from engine.core.errors import InvariantError, StorageError
from engine.core.evidence.chain import unlinked
from engine.core.history.heard_decisions import HeardDecisions
from engine.core.history.process_records import StartedRecord
from engine.core.history.record import Record, UnreadLine
from engine.core.history.record_lines import (
    TornLineError,
    commit_fields,
    decoded,
    refuse_other_version,
    whole_end,
)
from engine.core.history.retention import marked_steps
from engine.core.history.run_history import RunHistory, history_of
from engine.core.history.step_files import span_of
from engine.files.atomic_write import open_to_read
from engine.files.run_folder import refuse_size
from engine.files.step_reader import StepReader

_CHUNK_BYTES = 8_000_000
_MOST_LINE_BYTES = 1 << 20
_MOST_LONG_BYTES = 1 << 26  # of the losses of a twin of millions of steps, and of the seal of thousands of files
_LONG = (b'{"event":"twin",', b'{"event":"seal",', b'{"event":"scenario",')
_MOST_UNREAD = 1_000
_HEARD_COMMIT = '"line":"{\\"event\\":\\"commit\\",'


def read_history(path: Path, *, every_action: bool = False) -> RunHistory:
    """Returns the history that the records of a run add up to; raises the errors of `read_events`.

    Of its actions it has those that its recoveries are timed by, or every one; `files` has all of them. A run has
    millions, and each takes a hundred times longer to read as a record than as bytes.
    """
    history, files, heard = RunHistory(), StepReader(path.parent), HeardDecisions()
    for begin, data in whole_lines(path, 0):
        _add_lines(history, data, path, begin, heard)
    refuse_impossible(history, path)
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
        StorageError: the file cannot be read, or has a line that is longer than any record.
    """
    rest = b""
    try:
        with open(open_to_read(path), "rb") as file:  # a pipe or a device has no end
            refuse_size(path, os.fstat(file.fileno()))
            file.seek(start)
            while data := file.read(_CHUNK_BYTES):
                data = rest + data
                end = data.rfind(b"\n") + 1
                yield start, data[:end]
                start, rest = start + end, data[end:]
                _refuse_long(path, data[:end], rest)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


def refuse_impossible(history: RunHistory, path: Path, known: int = 0) -> None:
    """Raises StorageError if the records tell of more steps or slots than their job has: tables have a row for each.

    The first `known` commits were looked at before.
    """
    job = history.job
    if (last := max(history.commits.steps[known:], default=-1)) >= job.steps:
        raise StorageError(f"{path}: step {last} is committed, and the job has {job.steps} steps")
    if (most := max((len(each.owners) for each in history.epochs), default=0)) > job.pipelines * job.slots:
        raise StorageError(f"{path}: an epoch has {most} owners, and the job {job.pipelines * job.slots} slots")


def _refuse_long(path: Path, whole: bytes, rest: bytes) -> None:
    """Raises StorageError if a line is longer than any record; most parts have none that is long."""
    long = (
        [each for each in whole.split(b"\n") if len(each) > _MOST_LINE_BYTES] if len(whole) > _MOST_LINE_BYTES else []
    )
    for each in (*long, rest):
        most = _MOST_LONG_BYTES if each.startswith(_LONG) else _MOST_LINE_BYTES
        if len(each) > most:
            begin = each[:40].decode("utf-8", "replace")
            raise StorageError(f"{path}: no record is as long as the line that begins with {begin!r}")


def _pids(history: RunHistory) -> dict[int, int]:
    return {each.of: each.child for each in history.of(StartedRecord)}


def events_of(data: bytes, path: Path, start: int = 0, *, last_commits: bool = False) -> Iterator[Record]:
    """Yields the records in `data`, the bytes of `path` from `start` on; an unfinished last line is left out.

    With `last_commits` only the last of the commits in `data` is there: the others cost most of the time.

    Raises:
        StorageError: the data is no part of a file of events, or is of another version.
    """
    lines = _unlinked_lines(data)
    wanted: Sequence[int] = range(len(lines))
    if last_commits:
        last = next((number for number in reversed(wanted) if _is_commit(lines[number])), 0)
        wanted = [number for number in wanted if number == last or not _is_commit(lines[number])]
    records = _Records(path, start)
    for number in wanted:
        yield from records.of(lines[number], number)


def _unlinked_lines(data: bytes) -> list[str]:
    """Returns the whole lines in some bytes, without their links."""
    *lines, _ = data.decode("utf-8", "replace").split("\n")
    return [unlinked(each)[0] for each in lines]


class _Records:
    """The records in the lines behind byte `start` of a file."""

    def __init__(self, path: Path, start: int):
        self._path, self._start = path, start
        self._num_unread = 0
        self._before: Callable[[], int] = cache(partial(_lines_before, path, start))

    def of(self, line: str, number: int) -> Iterator[Record]:
        """Yields the record of the line of this number, from 0; raises the errors of `events_of`."""
        is_first = not self._start and not number
        try:
            record = decoded(line)
            if is_first:
                refuse_other_version(record)
        except TornLineError as error:
            self._num_unread += 1
            if is_first or self._num_unread > _MOST_UNREAD:
                more = f"; {_MOST_UNREAD:,} lines before it are none either" if self._num_unread > _MOST_UNREAD else ""
                raise StorageError(f"{self._path}:{self._before() + number + 1}: {error}{more}") from error
            yield UnreadLine(number=self._before() + number + 1)
            yield from _salvaged(line)
        except InvariantError as error:
            raise StorageError(f"{self._path}:{self._before() + number + 1}: {error}") from error
        else:
            yield record


def _add_lines(history: RunHistory, data: bytes, path: Path, start: int, heard: HeardDecisions) -> None:
    """Adds the records in whole lines to a history; a day has a million commits, which are read many at once."""
    commits: list[tuple[str, ...]] = []
    records = _Records(path, start)
    for number, line in enumerate(_unlinked_lines(data)):
        fields = commit_fields(line) if number or start else None
        if fields is not None:
            commits.append(fields)
            continue
        history.add_commits(commits)
        commits = []
        for record in records.of(line, number):
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
    if start < 0:
        return start  # the caller has put a line before the first
    count = 0
    with open(open_to_read(path), "rb") as file:
        while start and (data := file.read(min(start, _CHUNK_BYTES))):
            count, start = count + data.count(b"\n"), start - len(data)
    return count
