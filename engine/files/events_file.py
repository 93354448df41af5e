"""Reads events.jsonl, the only truth about a run; what is learned after its end is added there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.core.errors import StorageError


def read_events(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yields the events of a run in the order of writing; a last line that is still being written is left out.

    `start` is the size, in bytes, that the file once had: what was written before is left out too.

    Raises:
        StorageError: the file cannot be read, or a line before the last is no event.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
    yield from events_of(data, path)


def events_of(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of what was read of a run's file; a last line that is still being written is left out.

    Raises:
        StorageError: a line before the last is no event.
    """
    *lines, _ = data.decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines, start=1):
        event = _parsed(line)
        if not isinstance(event, dict) or "event" not in event:
            raise StorageError(f"{path}:{number}: expected one event as JSON, found {line[:80]!r}")
        yield event


def add_event(path: Path, event: str, **fields: object) -> None:
    """Adds to the events of a run that has ended what was learned afterwards; such an event has no time.

    Raises:
        StorageError: it could not be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **fields}, separators=(",", ":")) + "\n")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
