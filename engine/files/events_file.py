"""Reads events.jsonl, the only truth about a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.core.errors import StorageError


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a run in the order of writing; a last line that is still being written is left out.

    Raises:
        StorageError: the file cannot be read, or a line before the last is no event.
    """
    try:
        *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        event = _parsed(line)
        if not isinstance(event, dict) or "event" not in event:
            raise StorageError(f"{path}:{number}: expected one event as JSON, found {line[:80]!r}")
        yield event


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
