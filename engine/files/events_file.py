"""Reads events.jsonl, the record of a run from which every result is computed.

Rule: a torn line, left by a crash or a full disk, loses only itself. The reader yields `UnreadLine` in its place. A
file whose first line is not the job's is of another version, or not a file of events. It may come from elsewhere, so
the length of lines and the number of unread ones are bounded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from engine.codec.records import TornLineError, decoded, refuse_other_version, whole_end
from engine.core.errors import InvariantError, StorageError
from engine.core.history.evidence import unlinked
from engine.core.history.process_records import StartedRecord
from engine.core.history.run_history import ActionFiles, ReplicatedDecisions, RunHistory, history_of
from engine.core.history.run_records import ActionRecord, Record, UnreadLine
from engine.core.history.step_files import (
    CHORES,
    ENTRY_BYTES,
    FOLDER,
    StepFile,
    actions_in,
    marked_steps,
    span_of,
    step_file,
)
from engine.files.atomic_write import open_to_read
from engine.files.run_folder import refuse_size


class StepReader(ActionFiles):
    """The files of the actions of a run, as they are now; one that vanished meanwhile counts as never there."""

    def __init__(self, run: Path):
        self._folder = run / FOLDER
        self._sizes = dict(self._listed())
        self.num_bytes = sum(self._sizes.values())

    def _listed(self) -> Iterator[tuple[StepFile, int]]:
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    file = step_file(entry.name)
                    if file is not None and file.worker is not None and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):
                            yield file, entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"{self._folder}: {error.strerror}") from error

    def ranges(self) -> dict[int, int]:
        """Returns the first step of each range, in order, with the bytes of its actions."""
        num_bytes: dict[int, int] = {}
        for file, size in sorted(self._sizes.items()):
            num_bytes[file.first] = num_bytes.get(file.first, 0) + size
        return num_bytes

    def read(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yields each worker with the bytes of its actions in the range from step `first`; raises StorageError."""
        for entry in sorted(entry for entry in self._sizes if entry.first == first):
            path = self._folder / str(entry)
            try:
                with open(open_to_read(path), "rb") as file:
                    refuse_size(path, os.fstat(file.fileno()))
                    data = file.read()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StorageError(f"{path}: {error.strerror}") from error
            yield entry.worker or 0, data

    def actions(self, firsts: Collection[int], pids: Mapping[int, int], since: int = 0) -> Iterator[ActionRecord]:
        """Yields the actions of some ranges, of steps from `since` on; `pids` are those of the workers."""
        for first in firsts:
            for worker, data in self.read(first):
                yield from actions_in(data, worker, pids.get(worker, 0), since)

    def last_actions(self, pids: Mapping[int, int]) -> dict[int, ActionRecord]:
        """Returns the last action of each worker, from the end of its newest file."""
        newest: dict[int, int] = {}
        for (first, worker), size in self._sizes.items():
            if size >= ENTRY_BYTES and worker is not None:
                newest[worker] = max(first, newest.get(worker, 0))
        actions = {}
        for worker, first in newest.items():
            with contextlib.suppress(OSError), (self._folder / str(StepFile(first, worker))).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size // ENTRY_BYTES - _LAST) * ENTRY_BYTES)
                for action in actions_in(file.read(), worker, pids.get(worker, 0)):
                    actions[worker] = action
        return actions


_LAST = 2 + len(CHORES)  # entries, one of which is an action: no chore follows itself without one
_CHUNK_BYTES = 8_000_000
_MOST_LINE_BYTES = 1 << 20
_MOST_LONG_BYTES = 1 << 26  # for the losses of a twin with millions of steps, and the seal of thousands of files
_LONG = (b'{"event":"twin",', b'{"event":"seal",', b'{"event":"scenario",')
_MOST_UNREAD = 1_000
_HEARD_COMMIT = '"line":"{\\"event\\":\\"commit\\",'


def read_history(path: Path, *, every_action: bool = False) -> RunHistory:
    """Returns the history of a run; raises the errors of `read_events`.

    It has the actions by which recoveries are timed, or every one of millions, which takes a hundred times as long;
    `files` gives access to all.
    """
    history, files, decisions = RunHistory(), StepReader(path.parent), ReplicatedDecisions(decoded)
    _add(history, recorded(path), decisions)
    refuse_impossible(history, path)
    marked, span = marked_steps(history.records_of_recoveries), span_of(history.job)
    near = {step - step % span for step in marked}
    actions = files.actions([first for first in files.ranges() if every_action or first in near], _pids(history))
    history.add_actions(action for action in actions if every_action or action.step in marked)
    history.files = files
    return history


def read_events(path: Path, start: int = 0, since: int = 0) -> Iterator[Record]:
    """Yields the records by time from byte `start`, with the actions of steps from `since`; no partial line.

    Raises StorageError if a file cannot be read, is no file of events, or is of another version.
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
    """Yields the whole lines from byte `start`, in parts of some MB, with their offsets; raises StorageError."""
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


def refuse_impossible(history: RunHistory, path: Path, num_checked: int = 0) -> None:
    """Raises StorageError for more steps or slots than the job has; `num_checked` commits were checked before."""
    job = history.job
    if (last := max(history.commits.steps[num_checked:], default=-1)) >= job.steps:
        raise StorageError(f"{path}: step {last} is committed, and the job has {job.steps} steps")
    if (most := max((len(epoch.owners) for epoch in history.epochs), default=0)) > job.pipelines * job.slots:
        raise StorageError(f"{path}: an epoch has {most} owners, and the job {job.pipelines * job.slots} slots")


def _refuse_long(path: Path, whole: bytes, rest: bytes) -> None:
    """Raises StorageError if a line is longer than any record; a short part has no long line."""
    lines = whole.split(b"\n") if len(whole) > _MOST_LINE_BYTES else []
    for line in (*(line for line in lines if len(line) > _MOST_LINE_BYTES), rest):
        most = _MOST_LONG_BYTES if line.startswith(_LONG) else _MOST_LINE_BYTES
        if len(line) > most:
            begin = line[:40].decode("utf-8", "replace")
            raise StorageError(f"{path}: no record is as long as the line that begins with {begin!r}")


def _pids(history: RunHistory) -> dict[int, int]:
    return {record.of: record.child for record in history.of(StartedRecord)}


def events_of(data: bytes, path: Path, start: int = 0, *, last_commits: bool = False) -> Iterator[Record]:
    """Yields the records in `data`, the bytes of `path` from `start`; with `last_commits` only the last commit.

    An unfinished last line is left out. Raises StorageError if this is no part of a file of events of this version.
    """
    lines = [unlinked(line)[0] for line in data.decode("utf-8", "replace").split("\n")[:-1]]
    numbers: Sequence[int] = range(len(lines))
    if last_commits:
        last = next((number for number in reversed(numbers) if _is_commit(lines[number])), 0)
        numbers = [number for number in numbers if number == last or not _is_commit(lines[number])]
    records = _Records(path, start)
    for number in numbers:
        yield from records.of(lines[number], number)


class _Records:
    """The records in the lines of a file from byte `start` on."""

    def __init__(self, path: Path, start: int):
        self._path, self._start = path, start
        self._num_unread = 0
        self._before: Callable[[], int] = cache(partial(_lines_before, path, start))

    def of(self, line: str, number: int) -> Iterator[Record]:
        """Yields the record of line `number`, counted from 0; raises the errors of `events_of`."""
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
            with contextlib.suppress(InvariantError):
                if end := whole_end(line):
                    yield decoded(end)
        except InvariantError as error:
            raise StorageError(f"{self._path}:{self._before() + number + 1}: {error}") from error
        else:
            yield record


def _add(history: RunHistory, records: Iterable[Record], decisions: ReplicatedDecisions) -> None:
    for record in records:
        history.add(record)
        if (decision := decisions.decision(record)) is not None:
            history.add(decision)


def _is_commit(line: str) -> bool:
    """Whether a line is a commit, or another host's commit."""
    if line.startswith('{"event":"heard",'):
        return _HEARD_COMMIT in line and line.endswith(('\\"last\\":false}"}', '\\"last\\":true}"}'))
    return line.startswith('{"event":"commit",') and line.endswith(('"last":false}', '"last":true}'))


def _lines_before(path: Path, start: int) -> int:
    if start < 0:
        return start  # the caller has put a line before the first
    count = 0
    with open(open_to_read(path), "rb") as file:
        while start and (data := file.read(min(start, _CHUNK_BYTES))):
            count, start = count + data.count(b"\n"), start - len(data)
    return count


class GrowingEvents:
    """The records of a live run, without actions; each look reads the new lines, or of commits only the last."""

    def __init__(self, path: Path, *, last_commits: bool = False):
        self.path = path
        self._last_commits = last_commits
        self._history, self._decisions = RunHistory(), ReplicatedDecisions(decoded)
        self._num_bytes = 0  # read so far, always whole lines

    def read_on(self) -> RunHistory:
        """Returns the history with the lines since the last call; other hosts' replicated decisions count.

        Raises StorageError if the file cannot be read, is of another version, or a line is no event.
        """
        num_checked = len(self._history.commits)
        _add(self._history, self.news(), self._decisions)
        refuse_impossible(self._history, self.path, num_checked)
        return self._history

    def news(self) -> Iterator[Record]:
        """Yields the records written since the last call; raises the errors of `read_on`."""
        if not self.path.exists():
            return
        for start, data in whole_lines(self.path, self._num_bytes):
            yield from events_of(data, self.path, start, last_commits=self._last_commits)
            self._num_bytes = start + len(data)
