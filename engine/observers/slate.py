"""The progress of a logger, in memory that its process and the launcher share: the last step, the end, an error."""

from __future__ import annotations

import os
from struct import Struct
from typing import NamedTuple

_HEAD = Struct("<qq")  # the last step, and whether the logger has ended
_MOST_OF_TEXT = 1_000


class LoggerProgress(NamedTuple):
    """The last step that a logger has taken, whether it has taken the end, and the words of its error, or empty."""

    last_step: int = -1
    is_over: bool = False
    error: str = ""


class Slate:
    """A piece of memory behind a descriptor; the writer may be killed at any time."""

    def __init__(self, fd: int):
        self.fd = fd

    @staticmethod
    def new() -> Slate:
        """Returns an empty one."""
        slate = Slate(os.memfd_create("bamboo-logger"))
        slate.write(LoggerProgress())
        return slate

    def write(self, progress: LoggerProgress) -> None:
        """Replaces the progress."""
        text = progress.error.encode(errors="replace")[:_MOST_OF_TEXT]
        os.pwrite(self.fd, _HEAD.pack(progress.last_step, progress.is_over) + text, 0)

    def read(self) -> LoggerProgress:
        """Returns the progress."""
        data = os.pread(self.fd, _HEAD.size + _MOST_OF_TEXT, 0)
        last_step, is_over = _HEAD.unpack_from(data)
        return LoggerProgress(last_step, bool(is_over), data[_HEAD.size :].decode(errors="replace"))

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)
