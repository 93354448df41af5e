"""Reads events.jsonl, the only truth about a run; what is learned after its end is added there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.core.errors import InvariantError, StorageError
from engine.core.history.record import Record
from engine.core.history.record_lines import decoded, encoded, refuse_other_version
from engine.core.history.run_history import RunHistory, history_of


def read_history(path: Path) -> RunHistory:
    """Returns what the events of a run add up to; raises what `read_events` raises."""
    return history_of(read_events(path))


def read_events(path: Path, start: int = 0) -> Iterator[Record]:
    """Yields the records of a run in the order of writing; a last line that is still being written is left out.

    `start` is the size, in bytes, that the file once had: what was written before is left out too.

    Raises:
        StorageError: the file cannot be read, is of another version, or a line before the last is no event.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
    yield from events_of(data, path, start)


def events_of(data: bytes, path: Path, start: int = 0) -> Iterator[Record]:
    """Yields the records of what was read of a run's file from a byte on; a half-written last line is left out.

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


def add_event(path: Path, record: Record) -> None:
    """Adds to the events of a run that has ended what was learned afterwards; such an event has no time.

    Raises:
        StorageError: it could not be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{encoded(record)}\n")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
