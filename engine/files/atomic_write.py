"""Replaces a file in one step: after a crash, and for every reader, it holds the old text or the new one, no part."""

from __future__ import annotations

import os
from pathlib import Path

from engine.core.errors import StorageError


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file at `path` once the whole text is on disk.

    Raises:
        StorageError: the text could not be stored; the file at `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r}: {error.strerror}") from error
