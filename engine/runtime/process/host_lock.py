"""An advisory lock of a host: one worker at a time does background work, so that cores stay free for training.

It is a record lock on a file that all workers inherit, the progress board; the kernel releases it if its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
from collections.abc import Callable, Iterator

_LOOKS, _LOOK_S = 50, 0.001


class HostLock:
    """The lock of the file `fd`, which is the same for all workers; only one thread of a process may use it."""

    def __init__(self, fd: int):
        self._fd = fd

    @contextlib.contextmanager
    def acquire_when(self, is_good: Callable[[], bool], hurry: threading.Event) -> Iterator[bool]:
        """Tries each millisecond to take the lock while `is_good()`; holds it in the block and yields True.

        Yields False, without the lock, after 50 tries or once `hurry` is set. The caller does its work in either case.
        """
        is_locked = False
        for _ in range(_LOOKS):
            if (is_good() and (is_locked := self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB))) or hurry.wait(_LOOK_S):
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
