"""The bookkeeping of a link between two workers, pure: frames, their reader, arrivals, and the effects of faults."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from engine.core.errors import InvariantError

# The frame of a link: a header of fixed size, then the bytes of one piece of a message, or their place in a ring.
#
#     48 bytes, little-endian, each field an unsigned number of 64 bits
#     epoch    of the group in which the message was sent; an older one than the reader's is read and dropped
#     key      of the message: its lane, and its number
#     total    bytes of the whole message
#     start    of this piece in the message
#     length   bytes of this piece
#     offset   of the piece in the ring of the link, or `INLINE`: it follows the header
#
# Rules: the pieces of a message come in order, and nothing comes between them but a message of a newer epoch, or pieces
# of a message of state between those of another one, and the other way round. A message without bytes is one piece.

_FORM = struct.Struct("<6Q")
HEADER_BYTES = _FORM.size
INLINE = (1 << 64) - 1
MOST_BYTES = 1 << 40  # of a message: a length beyond is an accident or an attack
ALIGNMENT = 64  # of each tensor in a message: the receiver views its bytes in place
_new = tuple.__new__  # without the call of a function in Python

# The last two bits of a key: a message in program order, aside, or aside with state for another worker, which training
# does not wait for.
IN_ORDER, ASIDE, STATE = 0, 1, 2


def key_of(number: int, lane: int) -> int:
    """Returns the key of a message by its number in a lane."""
    return 4 * number + lane


def is_state(key: int) -> bool:
    """Returns whether a message is of the lane of state."""
    return key % 4 == STATE


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


_unpack = _FORM.unpack_from
packed = _FORM.pack  # the fields of a `Frame`, without the call of a function in Python


def unpacked(buffer: bytes | bytearray | memoryview, at: int = 0) -> Frame:
    """Returns the frame of the header at a place of a buffer; raises InvariantError for one that no sender makes."""
    frame: Frame = _new(Frame, _unpack(buffer, at))
    _, _, total, start, length, _ = frame
    if total > MOST_BYTES or start + length > total or (length == 0 and total > 0):
        raise InvariantError(f"a link has a frame that no sender makes: {frame}")
    return frame


def aligned(size: int) -> int:
    """Returns the bytes that a tensor of a size takes in a message before another one."""
    return -(-size // ALIGNMENT) * ALIGNMENT


# The reader of a link: bytes in, frames out; a read may end anywhere, also inside a header.
#
#     room()        where the next bytes go: into the reader's own buffer, or straight into the memory of a message
#     filled(n)     n bytes have come there; each frame that is whole now ends before the next one begins
#
# Large bodies go straight to their destination. Small ones come with the headers around them in one read, and are
# copied. A message that is one piece and has come with its header is offered whole first.

_BUFFER_BYTES = 80 << 10  # a small message in one read
_DIRECT_BYTES = 16 << 10  # the rest of a body from which it is read without a copy

Sink = Callable[[Frame], memoryview | None]  # the memory of the piece that a frame announces; None drops it
TakeWhole = Callable[[int, int, memoryview], bool]  # gets epoch, key and bytes of a message; whether it took that


class FrameReader:
    """The frames of one link; for each, `sink` is called once before its body is read, and `end` once it is whole.

    Neither is called for a message that `take_whole` has taken.
    """

    def __init__(
        self,
        sink: Sink,
        end: Callable[[Frame], None],
        take_whole: TakeWhole,
        size: int = _BUFFER_BYTES,
        direct: int = _DIRECT_BYTES,
    ):
        self._sink, self._end, self._take_whole, self._direct = sink, end, take_whole, direct
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
        if self._into is not None and self._is_direct:
            return self._into[len(self._into) - self._left :]
        return self._buffer[self._have :]

    def filled(self, count: int) -> None:
        """Takes in the bytes that have come to `room`; raises InvariantError for a frame that no sender makes."""
        have, at = self._have + count, 0
        if self._is_direct:  # then the buffer is empty
            self._left -= count
            self._is_direct, have = False, 0
        buffer, frame = self._buffer, self._frame
        while True:
            if frame is None:
                if have - at < HEADER_BYTES:
                    break
                epoch, key, total, _, length, offset = _unpack(buffer, at)
                begin = at + HEADER_BYTES
                is_whole = begin + length <= have and length == total and offset == INLINE
                if is_whole and self._take_whole(epoch, key, buffer[begin : begin + length]):
                    at = begin + length
                    continue
                self._frame = frame = unpacked(buffer, at)
                at = begin
                self._left = frame.length if frame.offset == INLINE else 0  # `inline`, without its call
                self._into = self._sink(frame)
            into, left = self._into, self._left
            size = min(left, have - at)
            if into is not None and size:
                begin = len(into) - left
                into[begin : begin + size] = buffer[at : at + size]
            at += size
            self._left = left - size
            if size < left:
                self._is_direct = into is not None and self._left >= self._direct
                break
            self._frame = self._into = None
            self._end(frame)
            frame = None
        rest = have - at
        if at and rest:
            buffer[:rest] = bytes(buffer[at:have])
        self._have = rest


# The space of a ring of shared memory, as its writer sees it: the place of the next piece, and the free bytes.
#
# The reader frees pieces in the order in which they were placed, and reports the total bytes freed. An empty ring
# starts over at its first byte, so that a link with little traffic touches little memory.

RING_BYTES = 64 << 20  # of shared memory, each way; only what was written is used
COUNT_BYTES = 64  # behind them, for the number of bytes freed


class RingSpace:
    """The space of one ring of `size` bytes."""

    def __init__(self, size: int):
        self._size = size
        self._placed: deque[tuple[int, int, int]] = deque()  # offset, end, bytes placed up to here
        self._total = 0

    def place(self, length: int, freed: int) -> int | None:
        """Returns the offset for a piece, now that the reader has freed so many bytes in all; None without room."""
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


# The messages of a link as their pieces come, and those of a group as they meet their receives.
#
#     Incoming    the messages of a link that have begun and not ended: one of state, and one of others
#     Mailbox     awaited messages, early ones, those of an older epoch
#
# Rules: a piece of an older epoch than the reader's is dropped, however much of its message has come. A message of a
# newer epoch waits until the reader enters that epoch, of which its sender learned first. Messages and receives of one
# source and key meet in order.

Room = TypeVar("Room", bound=Sized)
Receive = TypeVar("Receive")


class Incoming(Generic[Room]):
    """The open messages of one link; `room_of` returns the memory for the message of a frame."""

    def __init__(self, room_of: Callable[[Frame], Room]):
        self._room_of = room_of
        self.open: dict[bool, tuple[Frame, Room, int]] = {}  # by `is_state`; with the bytes that have come
        self._now: tuple[Frame, Room, int] | None = None  # that of the piece that has begun and not ended

    def begins(self, frame: Frame, floor: int) -> Room | None:
        """Returns the memory of the message to which a piece belongs; None if it is of an epoch before `floor`.

        Raises InvariantError for a piece out of order.
        """
        if frame.epoch < floor:
            return None
        message = self.open.pop(is_state(frame.key), None) if self.open else None
        if message is not None and message[0].epoch < floor:
            message = None
        if frame.start == 0:
            if message is not None and message[0].epoch >= frame.epoch:
                raise InvariantError(f"a message begins inside another one of its epoch: {frame}")
            message = frame, self._room_of(frame), 0
        elif message is None or message[0][:3] != frame[:3] or message[2] != frame.start:
            raise InvariantError(f"a piece of a message is out of order: {frame}")
        self._now = message
        return message[1]

    def ended(self, frame: Frame) -> Room | None:
        """Takes in the end of a piece; returns the memory of its message if that is whole and was not dropped."""
        now, self._now = self._now, None
        if now is None:
            return None
        first, room, got = now
        if got + frame.length < frame.total:
            self.open[is_state(frame.key)] = first, room, got + frame.length
            return None
        return room


class Mailbox(Generic[Receive, Room]):
    """The messages and receives of one worker; `epoch` is that of its present group."""

    def __init__(self) -> None:
        self.epoch = -1
        self._posted: dict[tuple[int, int], deque[tuple[Receive, Room]]] = {}
        self._early: dict[tuple[int, int], deque[tuple[int, Room]]] = {}

    def enter(self, epoch: int) -> None:
        """Begins the epoch of a new group: forgets all receives, and the messages of older epochs."""
        self.epoch = epoch
        self._posted = {}
        early = {address: deque(each for each in line if each[0] >= epoch) for address, line in self._early.items()}
        self._early = {address: line for address, line in early.items() if line}

    def leave(self) -> None:
        """Forgets the receives of the present group."""
        self._posted = {}

    def take_early(self, source: int, key: int) -> Room | None:
        """Returns the message that came before its receive, which need not be posted then; None if none has."""
        early = self._early.get((source, key))
        if not early or early[0][0] != self.epoch:
            return None
        _, room = early.popleft()
        if not early:
            del self._early[source, key]
        return room

    def post(self, source: int, key: int, receive: Receive, room: Room) -> None:
        """Posts a receive of which no message has come early, with memory for it."""
        self._posted.setdefault((source, key), deque()).append((receive, room))

    def room_for(self, source: int, frame: Frame) -> Room | None:
        """Returns the memory of the receive that the message of a frame will meet; None if it has another size."""
        posted = self._posted.get((source, frame.key)) if frame.epoch == self.epoch else None
        return posted[0][1] if posted and len(posted[0][1]) == frame.total else None

    def meet(self, source: int, epoch: int, key: int, size: int) -> tuple[Receive, Room] | None:
        """Returns the receive that a whole message meets, with its memory; None leaves it to `room_for` and `put`."""
        posted = self._posted.get((source, key)) if epoch == self.epoch else None
        return posted.popleft() if posted and len(posted[0][1]) == size else None

    def put(self, source: int, key: int, epoch: int, room: Room) -> Receive | None:
        """Takes in a whole message; returns its receive if that is posted, keeps the message if it may still be."""
        if epoch < self.epoch:
            return None
        posted = self._posted.get((source, key))
        if epoch > self.epoch or not posted:
            self._early.setdefault((source, key), deque()).append((epoch, room))
            return None
        return posted.popleft()[0]

    def awaits(self, source: int) -> bool:
        """Returns whether a receive from a worker is posted, and its message has not come."""
        return any(receives for (other, _), receives in self._posted.items() if other == source)

    def forget(self, source: int) -> None:
        """Forgets early messages from a worker whose number another one now has."""
        self._early = {address: each for address, each in self._early.items() if address[0] != source}


# What a fault does to a link: which bytes pass each way, and when; how many frames it has met. Pure.
#
#     delay    each byte passes `by_ns` later
#     stall    none passes before the end of the fault
#     reset    the next frame breaks off before its last byte, and the link ends
#
# Rule: bytes never overtake each other, so those that come after the end of a fault pass behind the last one held.

Way = Literal["there", "back"]  # from the worker that is struck to the peer, or from the peer to it


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A fault of a link; without `for_ns` it lasts as long as the link."""

    kind: Literal["delay", "stall", "reset"]
    direction: str = "both"  # or a way
    by_ns: int = 0
    for_ns: int | None = None


class FrameCount:
    """Counts the frames of a stream; of a frame begun before it, part of the header or the rest is known."""

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
