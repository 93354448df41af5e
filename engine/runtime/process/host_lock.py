"""A turn: one worker of a host at a time, for what several would do at the same moment though nobody waits for it.

A record lock on what all of them have inherited, the progress board; the kernel takes it back from who dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
from collections.abc import Callable, Iterator

_LOOKS, _LOOK_S = 50, 0.001


class Turn:
    """The turns of this process, of which one thread may ask. `fd` is the same file for everybody who takes turns."""

    def __init__(self, fd: int):
        self._fd = fd

    @contextlib.contextmanager
    def when(self, is_good: Callable[[], bool], hurry: threading.Event) -> Iterator[bool]:
        """Waits for a good moment in which nobody else has the turn; it has it inside the block, or yields False.

        `is_good` is asked every millisecond. Nobody waits long, nor any longer once there is a `hurry`.
        """
        has_turn = False
        for _ in range(_LOOKS):
            if (is_good() and (has_turn := self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB))) or hurry.wait(_LOOK_S):
                break
        try:
            yield has_turn
        finally:
            if has_turn:
                self._lock(fcntl.LOCK_UN)

    def _lock(self, how: int) -> bool:
        """Says whether that could be done; there is nothing that would have to end for want of a courtesy."""
        try:
            fcntl.lockf(self._fd, how, 1)
        except OSError:
            return False
        return True
