"""One end of the link to another worker: sends and receives messages.

    small       header and body over the socket, in one call
    large       the body in pieces through the ring, each header over the socket; without a ring, all over the socket

Rules: a send never blocks. What does not fit is queued in order and sent when there is room, from the main thread's
wait. State for another worker has a queue of its own: while other messages wait, it gets an eighth of the bytes, and
else as much as the link takes at once. So no message of training waits behind much of it. A fence drops the queued
messages, because their tensors may change; a frame that is partly sent is completed from a copy.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.core.errors import InvariantError, required
from engine.core.links import (
    COUNT_BYTES,
    INLINE,
    RING_BYTES,
    Disturbance,
    Frame,
    FrameCount,
    FrameReader,
    Incoming,
    Mailbox,
    RingSpace,
    aligned,
    is_state,
    packed,
)
from engine.runtime.transport.link_wire import Met, Wire, disturbed

# The memory of host tensors as bytes, which a socket or a ring reads and writes in place.


def memory_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous host tensor, and keeps it alive.

    It creates no tensor: every call into torch is slow in a process that has just woken up.
    """
    memory = _array(tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


@cache
def _array(size: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * size


def host_room(size: int) -> memoryview:
    """Returns uninitialised memory for a message."""
    return memory_of(torch.empty(size, dtype=torch.uint8, device="cpu"))


def tensor_of(memory: memoryview) -> Tensor:
    """Returns the tensor behind this memory, or part of it, of `memory_of`.

    It has to be the same tensor: torch tracks pinned memory by its storage, and would reuse it before copies made from
    another storage at the same address are complete.
    """
    return memory.obj.tensor  # type: ignore[attr-defined]


# A ring of memory shared by two workers: one writes pieces of messages into it, the other copies them out.
#
# The agent creates it as an unnamed file. Its last bytes hold a counter of the bytes freed so far, which the reader
# writes. The header of a piece follows over the socket after the write, so the reader never sees half a piece.


class _Ring:
    """The memory of a ring; takes over its descriptor."""

    def __init__(self, fd: int):
        size = RING_BYTES + COUNT_BYTES  # unlike Python's mmap, torch keeps no descriptor open
        path = f"/proc/self/fd/{fd}"
        memory = memory_of(torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu"))
        os.close(fd)
        self.bytes: memoryview = memory[:RING_BYTES]
        self._count = memory[RING_BYTES : RING_BYTES + 8].cast("Q")

    @property
    def freed(self) -> int:
        return int(self._count[0])

    @freed.setter
    def freed(self, count: int) -> None:
        self._count[0] = count


class OutRing(_Ring):
    """The writing end."""

    def __init__(self, fd: int):
        super().__init__(fd)
        self._space = RingSpace(RING_BYTES)

    def put(self, part: memoryview, length: int) -> int | None:
        """Copies `part` into a piece of `length` bytes or more; returns its offset, or None if there is no room."""
        offset = self._space.place(length, self.freed)
        if offset is not None:
            self.bytes[offset : offset + len(part)] = part
        return offset


class InRing(_Ring):
    """The reading end."""

    def take(self, offset: int, length: int, into: memoryview | None) -> None:
        """Copies a piece out, unless it is dropped, and frees it; raises ValueError if it is outside of the ring."""
        if offset + length > RING_BYTES:
            raise ValueError(f"a piece of {length} bytes at {offset} is outside of the ring")
        if into is not None:
            into[:] = self.bytes[offset : offset + length]
        self.freed += length


INLINE_BYTES = 64 << 10  # the largest message sent over the socket in one frame
_PIECE_BYTES = 256 << 10  # the receiver copies one piece out while the sender copies the next in
_STATE_BYTES = 64 << 10  # the same of state, between hosts
_STATE_AFTER = 7  # times as many bytes of messages that wait
_PADDING = bytes(64)

# Where the rest of the messages waits for room. State that would fill a link to another host waits as for a ring.
Lacks = Literal["", "socket", "ring"]


class PostedReceive(Protocol):
    """A receive that is posted."""

    def arrives(self, source: int, room: memoryview) -> None:
        """Accepts its message, which is in this memory."""


class _Outgoing:
    """A message being sent: its parts as bytes, and how much of it is gone."""

    def __init__(self, epoch: int, key: int, parts: Sequence[memoryview]):
        self.epoch, self.key, self.is_state = epoch, key, is_state(key)
        self.starts, at = [], 0
        self.parts = [part for part in parts if len(part)]
        for part in self.parts:
            self.starts.append(at := aligned(at))
            at += len(part)
        self.total, self.at, self._index = at, 0, 0

    @property
    def frame(self) -> list[memoryview | bytes]:
        """The only frame of a small message, with its body."""
        pieces: list[memoryview | bytes] = [Frame(self.epoch, self.key, self.total, 0, self.total).packed()]
        at = 0
        for start, part in zip(self.starts, self.parts, strict=True):
            pieces += [_PADDING[: start - at], part] if start > at else [part]
            at = start + len(part)
        return pieces

    def piece(self, most: int) -> tuple[memoryview, int]:
        """Returns the next bytes, from one part, and the length of their piece, including padding after the part."""
        part, start = self.parts[self._index], self.starts[self._index]
        begin = self.at - start
        rest = part[begin : begin + most]
        is_end = begin + len(rest) == len(part)
        if not is_end or self._index + 1 == len(self.parts):
            return rest, len(rest)
        return rest, self.starts[self._index + 1] - self.at

    def go_on(self, length: int) -> bool:
        """Counts a sent piece; returns whether it was the last."""
        self.at += length
        if self._index + 1 < len(self.parts) and self.at == self.starts[self._index + 1]:
            self._index += 1
        return self.at >= self.total


class Ends(NamedTuple):
    """The ends of a link as a worker receives them; there are no rings between hosts."""

    wire: Wire
    out: OutRing | None = None
    back: InRing | None = None


class PeerLink:
    """The link to worker `peer`; it has no ends until the agent has created them."""

    def __init__(
        self,
        peer: int,
        mailbox: Mailbox[PostedReceive, memoryview],
        room_of: Callable[[int], memoryview],
    ):
        self.peer = peer
        self.ends: Ends | None = None
        self.is_broken = self.awaits_room = self.is_retried = False
        self.sent_in = -1  # the epoch of the newest message
        self._mailbox, self._room_of = mailbox, room_of
        self._incoming: Incoming[memoryview] = Incoming(self._room_for)
        self._reader = FrameReader(self._sink, self._end_piece, self._take_whole)
        self._kept: deque[_Outgoing] = deque()
        self._state: deque[_Outgoing] = deque()
        self._ahead = 0  # bytes of other messages since the last piece of state
        self._rest: list[memoryview | bytes] = []  # of the frame being sent
        self._dropped: list[memoryview | bytes] = []  # that rest, if a fence came meanwhile: its loss is no failure
        self._lock = threading.RLock()  # for sending: another thread sends copies from a GPU

    @property
    def owes(self) -> bool:
        """Whether there is unsent data that no fence has dropped."""
        return bool(self._kept or self._state or (self._rest and self._rest is not self._dropped))

    def attach(self, ends: Ends) -> None:
        """Takes the ends of the link."""
        with self._lock:
            self.ends = ends

    def disturb(self, disturbance: Disturbance, met: Met) -> None:
        """Disturbs the link, which has ends, from the next byte on."""
        with self._lock:
            ends = required(self.ends, "a link without ends carries nothing")
            rest, self._rest = b"".join(self._rest), []
            wire = disturbed(ends.wire, disturbance, rest, FrameCount(*self._reader.rest), met)
            self.ends = ends._replace(wire=wire)

    def send(self, epoch: int, key: int, parts: Sequence[memoryview]) -> Lacks:
        """Starts to send a message of these bytes; returns where its rest waits. Raises OSError if broken."""
        with self._lock:
            self.sent_in = epoch
            ends, is_of_state = self.ends, is_state(key)
            is_queued = self._kept or self._rest or is_of_state
            if ends is None or is_queued or len(parts) != 1 or len(parts[0]) > INLINE_BYTES:
                (self._state if is_of_state else self._kept).append(_Outgoing(epoch, key, parts))
                return self.flush()
            (body,) = parts  # the fast path: the peer may be waiting
            self._rest = [packed(epoch, key, len(body), 0, len(body), INLINE), body]
            return "" if self._write(ends) else "socket"

    def flush(self) -> Lacks:
        """Sends queued messages while there is room; raises OSError if the link is broken."""
        with self._lock:
            while self.ends is not None:
                if self._rest and not self._write(self.ends):
                    return "socket"
                if not self._kept and not self._state:
                    break
                if not self._begin_frame(self.ends):
                    return "ring"
            return ""

    def _begin_frame(self, ends: Ends) -> bool:
        """Prepares the next frame; returns False if there is no room for it: in the ring, or for state in the link."""
        is_state_due = self._state and (not self._kept or self._ahead >= _STATE_AFTER * _STATE_BYTES)
        queue = self._state if is_state_due else self._kept
        if not self._kept and not ends.wire.has_room:
            return False
        message = queue[0]
        if message.total <= INLINE_BYTES:
            self._rest, length = message.frame, message.total
            queue.popleft()
        elif not (length := self._begin_piece(ends, message)):
            return False
        elif message.go_on(length):
            queue.popleft()
        self._ahead = 0 if is_state_due else self._ahead + length
        return True

    def _begin_piece(self, ends: Ends, message: _Outgoing) -> int:
        """Prepares the next piece of a message; returns its length, 0 if the ring has no room for it."""
        part, length = message.piece(_STATE_BYTES if message.is_state and ends.out is None else _PIECE_BYTES)
        offset: int | None = INLINE
        body: list[memoryview | bytes] = []
        if ends.out is None:
            body = [part, *[_PADDING[: length - len(part)]] * (length > len(part))]
        else:
            offset = ends.out.put(part, length)
        if offset is None:
            return 0
        self._rest = [Frame(message.epoch, message.key, message.total, message.at, length, offset).packed(), *body]
        return length

    def _write(self, ends: Ends) -> bool:
        try:
            count = ends.wire.write(self._rest)
        except BlockingIOError:
            return False
        if count == sum(map(len, self._rest)):
            self._rest = []
            return True
        while self._rest and count >= len(self._rest[0]):
            count -= len(self._rest.pop(0))
        if count:
            self._rest[0] = memoryview(self._rest[0])[count:]
        return not self._rest

    def drop_unsent(self) -> None:
        """Drops the queued messages, and copies the rest of a partly sent frame: its tensors may change now."""
        with self._lock:
            self._kept.clear()
            self._state.clear()
            self._rest = self._dropped = [b"".join(self._rest)] if self._rest else []

    def read(self) -> bool:
        """Reads everything available; returns False once the link is closed. Raises InvariantError for a bad frame."""
        while (ends := self.ends) is not None:
            room = self._reader.room()
            try:
                with self._lock:  # another thread may send, and close this end, whose descriptor is another one's then
                    count = ends.wire.read_into(room)
            except BlockingIOError:
                return True
            if not count:
                return False
            self._reader.filled(count)
            if count < len(room) and ends.wire.is_drained_short:
                return True
        return True

    def _take_whole(self, epoch: int, key: int, body: memoryview) -> bool:
        """Takes in a message for which a receive waits: the fast path, as this worker may wait for it."""
        met = None if self._incoming.open else self._mailbox.meet(self.peer, epoch, key, len(body))
        if met is None:
            return False
        receive, room = met
        room[:] = body
        receive.arrives(self.peer, room)
        return True

    def _sink(self, frame: Frame) -> memoryview | None:
        if frame.offset != INLINE:
            return None
        room = self._incoming.begins(frame, self._mailbox.epoch)
        return None if room is None else room[frame.start : frame.start + frame.length]

    def _room_for(self, frame: Frame) -> memoryview:
        room = self._mailbox.room_for(self.peer, frame)
        return self._room_of(frame.total) if room is None else room

    def _end_piece(self, frame: Frame) -> None:
        if frame.offset != INLINE:
            if self.ends is None or self.ends.back is None:
                raise InvariantError(f"a link without a ring has a frame of one: {frame}")
            room = self._incoming.begins(frame, self._mailbox.epoch)
            into = None if room is None else room[frame.start : frame.start + frame.length]
            self.ends.back.take(frame.offset, frame.length, into)
        whole = self._incoming.ended(frame)
        if whole is not None and (receive := self._mailbox.put(self.peer, frame.key, frame.epoch, whole)) is not None:
            receive.arrives(self.peer, whole)

    def close(self) -> None:
        """Closes this end."""
        with self._lock:
            self.is_broken = True
            self._kept.clear()
            self._state.clear()
            self._rest = []
            if self.ends is not None:
                self.ends.wire.close()
