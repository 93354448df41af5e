"""A ring of memory that two workers share: one writes pieces of messages into it, the other one copies them out.

The agent makes it, as a file without a name; its last bytes are a count that the reader writes: the bytes freed so far.
The header of a piece goes over the socket of the link behind the write, so that the reader never sees half a piece.
"""

from __future__ import annotations

import os

import torch

from engine.core.links.ring_space import RingSpace
from engine.runtime.ipc.link_pairs import COUNT_BYTES, RING_BYTES
from engine.runtime.links.memory import memory_of


class _Ring:
    """The memory of a ring; takes over its descriptor."""

    def __init__(self, fd: int):
        size = RING_BYTES + COUNT_BYTES  # torch keeps no descriptor of it, as a map of Python's does
        path = f"/proc/self/fd/{fd}"
        memory = memory_of(torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu"))
        os.close(fd)
        self.bytes: memoryview = memory[:RING_BYTES]
        self._count = memory[RING_BYTES : RING_BYTES + 8].cast("Q")

    @property
    def freed(self) -> int:
        """The bytes that the reader has freed."""
        return int(self._count[0])

    @freed.setter
    def freed(self, count: int) -> None:
        self._count[0] = count


class OutRing(_Ring):
    """The end that writes."""

    def __init__(self, fd: int):
        super().__init__(fd)
        self._space = RingSpace(RING_BYTES)

    def put(self, part: memoryview, length: int) -> int | None:
        """Copies bytes into a piece of `length`, at least theirs; returns its offset, or None if there is no room."""
        offset = self._space.place(length, self.freed)
        if offset is not None:
            self.bytes[offset : offset + len(part)] = part
        return offset


class InRing(_Ring):
    """The end that reads."""

    def take(self, offset: int, length: int, into: memoryview | None) -> None:
        """Copies a piece out, unless it is dropped, and frees it; raises ValueError for one outside of the ring."""
        if offset + length > RING_BYTES:
            raise ValueError(f"a piece of {length} bytes at {offset} is outside of the ring")
        if into is not None:
            into[:] = self.bytes[offset : offset + length]
        self.freed += length
