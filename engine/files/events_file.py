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
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            return
        try:
            yield json.loads(line)
        except ValueError as error:
            raise StorageError(f"{path}:{number}: expected one event as JSON, found {line[:80]!r}") from error
