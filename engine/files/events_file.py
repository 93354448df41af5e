"""Reads events.jsonl, the record of a run from which every result is computed, and adds records to it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine.core.errors import InvariantError, StorageError
from engine.core.history.record import AGENT, Record, StampedRecord
from engine.core.history.record_lines import decoded, encoded, refuse_other_version
from engine.core.history.run_history import RunHistory, history_of
from engine.files.atomic_write import storage_errors


def read_history(path: Path) -> RunHistory:
    """Returns the history that the events of a run add up to; raises the errors of `read_events`."""
    return history_of(read_events(path))


def read_events(path: Path, start: int = 0) -> Iterator[Record]:
    """Yields the records of a run in the order of writing, from byte `start` on; an unfinished last line is left out.

    Raises:
        StorageError: the file cannot be read, is of another version, or a line before the last is no event.
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
        StorageError: the file is of another version, or a line before the last is no event.
    """
    *lines, _ = data.decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines):
        try:
            record = decoded(line)
            if not start and not number:
                refuse_other_version(record)
        except InvariantError as error:
            before = path.read_bytes()[:start].count(b"\n")
            raise StorageError(f"{path}:{before + number + 1}: {error}") from error
        yield record


def add_records(path: Path, *records: StampedRecord) -> None:
    """Appends records of the launcher, or of another command about the run, with the present time.

    Raises:
        StorageError: the file could not be written.
    """
    stamp = {"worker": AGENT, "pid": os.getpid(), "at_ns": time.monotonic_ns()}
    lines = "".join(f"{encoded(replace(each, **stamp))}\n" for each in records)
    with storage_errors("write", path), path.open("a", encoding="utf-8") as file:
        file.write(lines)
