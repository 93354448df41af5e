"""Locks of a host: on a folder that a process uses, and for background work, one worker at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.files.atomic_write import closing_fd

# A lock on a folder that a process uses; the kernel releases it when the process ends, also by SIGKILL.
#
# Rule: a file system may have no such locks. A folder there counts as used, because nothing proves the contrary.


@contextlib.contextmanager
def folder_used(folder: Path) -> Iterator[None]:
    """Marks a folder as used during the block; several processes may use it. The lock is not inherited."""
    with closing_fd(_open(folder)) as fd:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        yield


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


# An advisory lock of a host: one worker at a time does background work, so that cores stay free for training. Without
# turns, the median stall of 16 notices on two busy cores was 50 ms instead of 22.
#
# It is a record lock on a file that all workers inherit, the progress board; the kernel releases it if its holder dies.

# With 16 workers on two cores, a look each millisecond took most of both. In all less than a step: a plan that is made
# for the end of the open step, by workers that are always later, is never used.
_WAITS_S = [0.001 * 2**look for look in range(5)]


class HostLock:
    """The lock of the file `fd`, which is the same for all workers; only one thread of a process may use it."""

    def __init__(self, fd: int):
        self._fd = fd

    @contextlib.contextmanager
    def acquire_when(self, is_good: Callable[[], bool], hurry: threading.Event) -> Iterator[bool]:
        """Tries more and more seldom to take the lock while `is_good()`; holds it in the block and yields True.

        Yields False, without the lock, after 31 ms or once `hurry` is set. The caller does its work in either case.
        """
        is_locked = False
        for wait_s in _WAITS_S:
            if (is_good() and (is_locked := self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB))) or hurry.wait(wait_s):
                break
        try:
            yield is_locked
        finally:
            if is_locked:
                self._lock(fcntl.LOCK_UN)

    def _lock(self, how: int) -> bool:
        """Returns whether the call succeeded; an error is ignored, because the lock is only advisory."""
        try:
            fcntl.lockf(self._fd, how, 1)
        except OSError:
            return False
        return True
