"""The frame of a link: a header of fixed size, then the bytes of one piece of a message, or their place in a ring.

    48 bytes, little-endian, each field an unsigned number of 64 bits
    epoch    of the group in which the message was sent; an older one than the reader's is read and dropped
    key      of the message: program order or aside, and its number
    total    bytes of the whole message
    start    of this piece in the message
    length   bytes of this piece
    offset   of the piece in the ring of the link, or `INLINE`: it follows the header

Rules: the pieces of a message come in order, and nothing comes between them but a message of a newer epoch. A message
without bytes is one piece without bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from engine.core.errors import InvariantError

_FORM = struct.Struct("<6Q")
HEADER_BYTES = _FORM.size
INLINE = (1 << 64) - 1
MOST_BYTES = 1 << 40  # of a message: a length beyond is an accident or an attack
ALIGNMENT = 64  # of each tensor in a message: the receiver views its bytes in place


class Frame(NamedTuple):
    """One header."""

    epoch: int
    key: int
    total: int
    start: int
    length: int
    offset: int = INLINE

    def packed(self) -> bytes:
        """Returns the header as it travels."""
        return _FORM.pack(*self)

    @property
    def inline(self) -> int:
        """The bytes that follow the header."""
        return self.length if self.offset == INLINE else 0


def unpacked(buffer: bytes | bytearray | memoryview, at: int = 0) -> Frame:
    """Returns the frame of the header at a place of a buffer; raises InvariantError for one that no sender makes."""
    frame = Frame(*_FORM.unpack_from(buffer, at))
    _, _, total, start, length, _ = frame
    if total > MOST_BYTES or start + length > total or (length == 0 and total > 0):
        raise InvariantError(f"a link has a frame that no sender makes: {frame}")
    return frame


def aligned(size: int) -> int:
    """Returns the bytes that a tensor of a size takes in a message before another one."""
    return -(-size // ALIGNMENT) * ALIGNMENT
