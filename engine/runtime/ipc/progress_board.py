"""The progress board: one line of shared memory per worker, that the worker writes and the launcher reads.

Anonymous memory: no name, so nothing is left behind however the run ends.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

_LINE = struct.Struct("<qq16s")
_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a worker is: its step, the forwards and backwards it has finished in all, and the action it is at."""

    step: int
    num_computed: int
    action: str


class ProgressBoard:
    """The board; `fd` is handed to workers, which map the same memory."""

    def __init__(self, fd: int, num_lines: int):
        self.fd = fd
        self._memory = mmap.mmap(fd, num_lines * _LINE_BYTES)

    @classmethod
    def create(cls, num_lines: int) -> ProgressBoard:
        """Returns a new board with `num_lines` empty lines."""
        fd = os.memfd_create("bamboo-progress")
        os.ftruncate(fd, num_lines * _LINE_BYTES)
        return cls(fd, num_lines)

    def write(self, line: int, step: int, num_computed: int, action: str) -> None:
        """Overwrites one line."""
        _LINE.pack_into(self._memory, line * _LINE_BYTES, step, num_computed, action.encode())

    def read(self, line: int) -> Progress:
        """Returns one line; a reader may see half of an update, which only a picture is made of."""
        step, num_computed, action = _LINE.unpack_from(self._memory, line * _LINE_BYTES)
        return Progress(step, num_computed, action.rstrip(b"\0").decode(errors="replace"))

    def close(self) -> None:
        """Unmaps the memory and closes the descriptor."""
        self._memory.close()
        os.close(self.fd)
