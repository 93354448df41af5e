"""The reader of a link: bytes in, frames out; a read may end anywhere, also inside a header.

    room()        where the next bytes go: into the reader's own buffer, or straight into the memory of a message
    filled(n)     n bytes have come there; yields each frame that is whole now, before the next one begins

Large bodies go straight to their destination. Small ones come with the headers around them in one read, and are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.core.errors import required
from engine.core.links.frame import HEADER_BYTES, Frame, unpacked

_BUFFER_BYTES = 80 << 10  # a small message in one read
_DIRECT_BYTES = 16 << 10  # the rest of a body from which it is read without a copy

Sink = Callable[[Frame], memoryview | None]  # the memory of the piece that a frame announces; None drops it


class FrameReader:
    """The frames of one link; `sink` is called once for each, before its body is read."""

    def __init__(self, sink: Sink, size: int = _BUFFER_BYTES, direct: int = _DIRECT_BYTES):
        self._sink, self._direct = sink, direct
        self._buffer = memoryview(bytearray(max(size, HEADER_BYTES)))
        self._have = 0  # bytes of the buffer that are not handled
        self._frame: Frame | None = None
        self._into: memoryview | None = None
        self._left = 0  # bytes of the body that have not come
        self._is_direct = False

    @property
    def rest(self) -> tuple[bytes, int]:
        """The frame that has begun and not ended: a part of its header, or the bytes of its body that are to come."""
        return bytes(self._buffer[: self._have]), self._left

    def room(self) -> memoryview:
        """Returns the memory for the next bytes; it has at least one."""
        self._is_direct = self._into is not None and self._left >= self._direct
        if self._into is not None and self._is_direct:
            return self._into[len(self._into) - self._left :]
        return self._buffer[self._have :]

    def filled(self, count: int) -> Iterator[Frame]:
        """Takes in the bytes that have come to `room`, and yields frames, all of which must be taken.

        Raises InvariantError for a frame that no sender makes.
        """
        if self._is_direct:
            self._left -= count
            if not self._left:
                yield self._ended()
            return
        self._have += count
        at = 0
        while True:
            if self._frame is None:
                if self._have - at < HEADER_BYTES:
                    break
                self._frame = unpacked(self._buffer, at)
                at += HEADER_BYTES
                self._left = self._frame.inline
                self._into = self._sink(self._frame)
            at += self._copy(at)
            if self._left:
                break
            yield self._ended()
        rest = self._have - at
        if at and rest:
            self._buffer[:rest] = bytes(self._buffer[at : self._have])
        self._have = rest

    def _copy(self, at: int) -> int:
        count = min(self._left, self._have - at)
        if self._into is not None and count:
            begin = len(self._into) - self._left
            self._into[begin : begin + count] = self._buffer[at : at + count]
        self._left -= count
        return count

    def _ended(self) -> Frame:
        frame = required(self._frame, "a frame that ends has begun")
        self._frame, self._into, self._is_direct = None, None, False
        return frame
