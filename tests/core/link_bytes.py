"""The bytes of a link for tests: messages as their sender cuts them, and an end that reads them in any chunks.

The end is made of the parts of the engine, put together as `PeerLink` and `Links` do, without a socket. A `Classes`
with a planted bug in one of them shows that a test would find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

from engine.core.links import Frame, FrameReader, Incoming, Mailbox

_ROOM_SIZES = (100, 10, 10, 120, 60, 60, 1, 0)  # of receives, in turn


class Sent(NamedTuple):
    """A message as it is sent: in pieces of at most `piece` bytes, of which `cut` leave, or all of them."""

    epoch: int
    key: int
    body: bytes
    piece: int = 1 << 30
    cut: int | None = None

    def frames(self) -> Iterator[tuple[Frame, bytes]]:
        """Yields the pieces that leave before a fence drops the rest."""
        size = len(self.body)
        starts = range(0, size, self.piece) if size else [0]
        for start in list(starts)[: self.cut]:
            piece = self.body[start : start + self.piece]
            yield Frame(self.epoch, self.key, size, start, len(piece)), piece

    @property
    def is_whole(self) -> bool:
        """Whether all of it leaves."""
        return self.cut is None


def stream_of(messages: Sequence[Sent]) -> bytes:
    """Returns the bytes of messages behind one another."""
    return b"".join(frame.packed() + body for message in messages for frame, body in message.frames())


@dataclass(frozen=True)
class Classes:
    """The parts of an end."""

    incoming: Callable[..., Incoming[bytearray]] = Incoming
    mailbox: Callable[..., Mailbox[int, bytearray]] = Mailbox
    reader: Callable[..., FrameReader] = FrameReader


OURS = Classes()


class End:
    """The end that reads; it knows one worker, 0, and posts receives itself."""

    def __init__(self, classes: Classes = OURS, size: int = 256, direct: int = 64):
        self.mailbox = classes.mailbox()
        self._taken: list[tuple[int, bytearray]] = []  # key and memory of each message that has met its receive
        self._sizes = cycle(_ROOM_SIZES)
        self._incoming = classes.incoming(self._room_of)
        self._reader = classes.reader(self._sink, self._end, self._take_whole, size, direct)

    def _room_of(self, frame: Frame) -> bytearray:
        room = self.mailbox.room_for(0, frame)
        return bytearray(frame.total) if room is None else room

    def _sink(self, frame: Frame) -> memoryview | None:
        room = self._incoming.begins(frame, self.mailbox.epoch)
        return None if room is None else memoryview(room)[frame.start : frame.start + frame.length]

    def _take_whole(self, epoch: int, key: int, body: memoryview) -> bool:
        met = None if self._incoming.open else self.mailbox.meet(0, epoch, key, len(body))
        if met is not None:
            receive, room = met
            memoryview(room)[:] = body
            assert receive == key
            self._taken.append((key, room))
        return met is not None

    def read(self, data: bytes) -> None:
        """Reads bytes as they come from a socket: as many at once as there is room for."""
        view = memoryview(data)
        while view:
            room = self._reader.room()
            count = min(len(room), len(view))
            assert count
            room[:count] = view[:count]
            view = view[count:]
            self._reader.filled(count)

    def _end(self, frame: Frame) -> None:
        whole = self._incoming.ended(frame)
        if whole is not None and (receive := self.mailbox.put(0, frame.key, frame.epoch, whole)) is not None:
            assert receive == frame.key
            self._taken.append((frame.key, whole))

    @property
    def taken(self) -> list[tuple[int, bytes]]:
        """The messages that have met their receives, as their memory is now."""
        return [(key, bytes(room)) for key, room in self._taken]

    def forget_taken(self) -> None:
        """Forgets these."""
        self._taken.clear()

    def post(self, *keys: int) -> None:
        """Posts receives, with memory that has the size of their message or another one."""
        for key in keys:
            if (early := self.mailbox.take_early(0, key)) is not None:
                self._taken.append((key, early))
            else:
                self.mailbox.post(0, key, key, bytearray(next(self._sizes)))
