"""The space of a ring of shared memory, as its writer sees it: the place of the next piece, and the free bytes.

The reader frees pieces in the order in which they were placed, and tells how many bytes that were in all. An empty ring
begins again at its first byte, so that a link with little on its way touches little memory.
"""

from __future__ import annotations

from collections import deque


class RingSpace:
    """The space of one ring of `size` bytes."""

    def __init__(self, size: int):
        self._size = size
        self._placed: deque[tuple[int, int, int]] = deque()  # offset, end, bytes placed up to here
        self._total = 0

    def place(self, length: int, freed: int) -> int | None:
        """Returns the offset for a piece, after the reader has freed so many bytes in all; None if there is no room."""
        placed = self._placed
        while placed and placed[0][2] <= freed:
            placed.popleft()
        offset = self._gap(length)
        if offset is not None:
            self._total += length
            placed.append((offset, offset + length, self._total))
        return offset

    def _gap(self, length: int) -> int | None:
        if not self._placed:
            return 0 if length <= self._size else None
        first, end = self._placed[0][0], self._placed[-1][1]
        if self._placed[-1][0] < first:  # it has wrapped
            return end if end + length <= first else None
        if end + length <= self._size:
            return end
        return 0 if length <= first else None
