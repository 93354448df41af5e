"""Reads events.jsonl, the record of a run from which every result is computed, and adds records to it.

Rule: a torn line, which is half of a line that a crash or a full disk left, costs itself only. The reader yields
`UnreadLine` in its place. A file whose first line is not the job's is of another version, or no file of events.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine.core.errors import InvariantError, StorageError
from engine.core.history.record import AGENT, Record, StampedRecord, UnreadLine
from engine.core.history.record_lines import TornLineError, decoded, encoded, refuse_other_version, whole_end
from engine.core.history.run_history import RunHistory, history_of
from engine.files.atomic_write import open_to_append, storage_errors


def read_history(path: Path) -> RunHistory:
    """Returns the history that the events of a run add up to; raises the errors of `read_events`."""
    return history_of(read_events(path))


def read_events(path: Path, start: int = 0) -> Iterator[Record]:
    """Yields the records of a run in the order of writing, from byte `start` on; an unfinished last line is left out.

    Raises:
        StorageError: the file cannot be read, is no file of events, or is of another version.
    """
    yield from events_of(bytes_from(path, start), path, start)


def bytes_from(path: Path, start: int) -> bytes:
    """Returns the bytes of a file of events from `start` on; raises StorageError if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


def events_of(data: bytes, path: Path, start: int = 0) -> Iterator[Record]:
    """Yields the records in `data`, the bytes of `path` from `start` on; an unfinished last line is left out.

    Raises:
        StorageError: the data is no part of a file of events, or is of another version.
    """
    *lines, _ = data.decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines):
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
