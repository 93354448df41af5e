"""A bundle: the frames that are due at one time travel as one message, because each message has its price.

Rule: each frame has its length in front of it, four bytes, the highest one first. A bundle without a frame, or one
whose lengths do not add up, ends the stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from engine.core.errors import InvariantError
from engine.core.hosts.host_messages import MOST_BYTES

_LENGTH = Struct(">I")
MOST_BUNDLE_BYTES = MOST_BYTES + _LENGTH.size


def fits(num_bytes: int, frame: bytes) -> bool:
    """Returns whether a frame fits a bundle that has `num_bytes` already; the first one always does."""
    return not num_bytes or num_bytes + bundled_bytes(frame) <= MOST_BUNDLE_BYTES


def bundled_bytes(frame: bytes) -> int:
    """Returns the bytes of a frame in a bundle."""
    return _LENGTH.size + len(frame)


def bundle(frames: Iterable[bytes]) -> bytes:
    """Returns frames as one message."""
    return b"".join(part for each in frames for part in (_LENGTH.pack(len(each)), each))


def frames_of(data: bytes) -> list[bytes]:
    """Returns the frames of a bundle, in order; raises InvariantError for another form."""
    found, place = list[bytes](), 0
    while place < len(data) or not found:
        begin = place + _LENGTH.size
        place = begin + (_LENGTH.unpack_from(data, place)[0] if begin <= len(data) else 0)
        if place > len(data):
            raise InvariantError(f"a bundle of {len(data)} bytes ends inside of a frame")
        found.append(data[begin:place])
    return found
