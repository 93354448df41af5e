"""A lock on a folder that a process uses; the kernel releases it when the process ends, also by SIGKILL.

Rule: a file system may have no such locks. A folder there counts as used, because nothing proves the contrary.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def folder_used(folder: Path) -> Iterator[None]:
    """Marks a folder as used during the block; several processes may use it. The lock is not inherited."""
    fd = _open(folder)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def unused_folder(folder: Path) -> Iterator[bool]:
    """Yields whether no process uses a folder; then no process can begin to use it during the block."""
    fd = -1
    try:
        try:
            fd = _open(folder)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            is_unused = False
        else:
            is_unused = True
        yield is_unused
    finally:
        if fd >= 0:
            os.close(fd)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
