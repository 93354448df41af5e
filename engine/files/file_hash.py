"""The SHA-256 of a file of the user's, which is read once for all who ask as long as it stays the same.

Rule: a file is the same while it has the size and the times that it had. One that changed a moment ago is read each
time: it could change again within one tick of the clock.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import NamedTuple

_MOMENT_NS = 2_000_000_000  # the coarsest times of a file system
_Facts = tuple[int, int, int, int, int]
_known: dict[_Facts, str] = {}


class FileHash(NamedTuple):
    """The size of a file in bytes, and its SHA-256 (hex)."""

    size: int
    sha256: str


def file_hash(path: str | Path) -> FileHash:
    """Returns the size and the hash of a file; raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        began_ns, found = time.time_ns(), os.fstat(file.fileno())
        facts = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        sha256 = _known.get(facts) or hashlib.file_digest(file, "sha256").hexdigest()
    if began_ns - max(found.st_mtime_ns, found.st_ctime_ns) > _MOMENT_NS:
        _known[facts] = sha256
    return FileHash(found.st_size, sha256)
