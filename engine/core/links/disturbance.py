"""What a fault does to a link: which bytes pass each way, and when; how many frames it has met. Pure.

    delay    each byte passes `by_ns` later
    stall    none passes before the end of the fault
    reset    the next frame breaks off before its last byte, and the link ends

Rule: bytes never overtake each other, so those that come after the end of a fault pass behind the last one held.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from engine.core.links.frame import HEADER_BYTES, unpacked

Way = Literal["there", "back"]  # from the worker that is struck to the peer, or from the peer to it


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A fault of a link; without `for_ns` it lasts as long as the link."""

    kind: Literal["delay", "stall", "reset"]
    direction: str = "both"  # or a way
    by_ns: int = 0
    for_ns: int | None = None


class FrameCount:
    """Counts the frames of a stream; of one that has begun before it, part of its header or the rest is known."""

    def __init__(self, head: bytes = b"", left: int = 0):
        self.whole = 0
        self._head, self._left = bytearray(head), left

    @property
    def begun(self) -> int:
        """The frames that have come, also in part."""
        return self.whole + bool(self._head or self._left)

    def put(self, data: bytes) -> None:
        """Takes in the next bytes; raises InvariantError for a frame that no sender makes."""
        at = 0
        while at < len(data):
            if not self._left:
                begin, at = at, min(len(data), at + HEADER_BYTES - len(self._head))
                self._head += data[begin:at]
                if len(self._head) < HEADER_BYTES:
                    return
                self._left = unpacked(self._head).inline
                self._head.clear()
            count = min(self._left, len(data) - at)
            at, self._left = at + count, self._left - count
            self.whole += not self._left


class Flow:
    """One way of a disturbed link: the bytes that it holds."""

    def __init__(self, way: Way, disturbance: Disturbance, began_ns: int, frames: FrameCount):
        self.num_met = 0  # frames that were held, also in part, or that broke off
        self.is_over = False  # the link ends with the bytes that are held
        self._kind = disturbance.kind if disturbance.direction in (way, "both") else None
        lasts_ns = math.inf if disturbance.for_ns is None else disturbance.for_ns
        self._by_ns, self._until_ns = disturbance.by_ns, began_ns + lasts_ns
        self._frames, self._last_met = frames, 0
        self._held: deque[tuple[float, bytes]] = deque()

    def put(self, data: bytes, now_ns: int) -> None:
        """Takes in the next bytes."""
        before = self._frames.whole
        self._frames.put(data)
        if self._kind == "reset":
            self.num_met, self.is_over = 1, True
            self._held.append((now_ns, data[:-1]))
            return
        due_ns: float = now_ns
        if self._kind is not None and now_ns < self._until_ns:
            due_ns = self._until_ns if self._kind == "stall" else now_ns + self._by_ns
            self.num_met += self._frames.begun - max(before, self._last_met)
            self._last_met = self._frames.begun
        self._held.append((due_ns, data))

    @property
    def due_ns(self) -> float:
        """When the first held bytes pass; infinity if none do."""
        return self._held[0][0] if self._held else math.inf

    @property
    def keeps_end(self) -> bool:
        """Whether the end of the stream must wait for held bytes: it does for late ones, not for those of a stall."""
        return bool(self._held) and self._kind != "stall"

    def due(self, now_ns: int) -> bytes:
        """Returns the first bytes that may pass now, or none."""
        return self._held[0][1] if self.due_ns <= now_ns else b""

    def passed(self, count: int) -> None:
        """Takes away so many of the bytes that were due."""
        due_ns, data = self._held.popleft()
        if count < len(data):
            self._held.appendleft((due_ns, data[count:]))
