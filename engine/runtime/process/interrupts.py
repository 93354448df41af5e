"""Ctrl-C, SIGTERM and SIGHUP as a descriptor that becomes readable, for a selector."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

_TAKEN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Blocks Ctrl-C while a child starts: it would kill a child that has not left the terminal's session yet.

    The child inherits the block and calls `ignore_ctrl_c` in its own session.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ctrl_c() -> None:
    """Ignores Ctrl-C, also one that came while it was blocked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


class Interrupts:
    """A context that receives the signals that ask this process to end; use it in the main thread."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        for number in _TAKEN:
            self._before[number] = signal.signal(number, self._note)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # the kernel would drop exit codes of children
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _note(self, number: int, frame: FrameType | None) -> None:
        os.write(self._write_fd, bytes([number]))

    def fileno(self) -> int:
        """Returns the descriptor that is readable if a signal has come."""
        return self._read_fd

    def take(self) -> signal.Signals:
        """Returns the oldest signal that has come."""
        return signal.Signals(os.read(self._read_fd, 1)[0])
