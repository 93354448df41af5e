"""Replaces a file in one step: after a crash, and for every reader, it holds the old text or the new one, no part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.core.errors import StorageError


@contextmanager
def storage_errors(verb: str, path: Path, hint: str = "") -> Iterator[None]:
    """Turns an OSError into a StorageError, ``cannot VERB PATH: REASON``, followed by the hint in parentheses."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror} ({hint})" if hint else error.strerror
        raise StorageError(f"cannot {verb} {str(path)!r}: {reason}") from error


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file at `path` once the whole text is on disk.

    Raises:
        StorageError: the text could not be stored; the file at `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors("write", path):
        try:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
