"""The messages of a link as their pieces come, and those of a group as they meet their receives.

    Incoming    the one message of a link that has begun and not ended
    Mailbox     awaited messages, early ones, those of an older epoch

Rules: a piece of an older epoch than the reader's is dropped, however much of its message has come. A message of a
newer epoch waits until the reader enters that epoch: its sender heard of it first. Messages and receives of one source
and key meet in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sized
from typing import Generic, NamedTuple, TypeVar

from engine.core.errors import InvariantError
from engine.core.links.frame import Frame

Room = TypeVar("Room", bound=Sized)
Wanted = TypeVar("Wanted")


class Incoming(Generic[Room]):
    """The open message of one link; `room_of` returns the memory for the message of a frame."""

    def __init__(self, room_of: Callable[[Frame], Room]):
        self._room_of = room_of
        self._open: tuple[Frame, Room] | None = None
        self._got = 0

    def begins(self, frame: Frame, floor: int) -> Room | None:
        """Returns the memory of the message to which a piece belongs; None if it is of an epoch before `floor`.

        Raises InvariantError for a piece out of order.
        """
        if frame.epoch < floor:
            return None
        if self._open is not None and self._open[0].epoch < floor:
            self._open = None
        if frame.start == 0:
            if self._open is not None and self._open[0].epoch >= frame.epoch:
                raise InvariantError(f"a message begins inside another one of its epoch: {frame}")
            self._open, self._got = (frame, self._room_of(frame)), 0
        elif self._open is None or self._open[0][:3] != frame[:3] or self._got != frame.start:
            raise InvariantError(f"a piece of a message is out of order: {frame}")
        return self._open[1]

    def ended(self, frame: Frame, floor: int) -> Room | None:
        """Takes in the end of a piece; returns the memory of its message if that is whole, and of no older epoch."""
        if frame.epoch < floor or self._open is None:
            return None
        self._got += frame.length
        if self._got < frame.total:
            return None
        room, self._open = self._open[1], None
        return room


class Arrival(NamedTuple, Generic[Wanted, Room]):
    """A message that has met its receive."""

    source: int
    key: int
    wanted: Wanted
    room: Room


class Mailbox(Generic[Wanted, Room]):
    """The messages and receives of one worker; `epoch` is that of its present group."""

    def __init__(self) -> None:
        self.epoch = -1
        self._posted: dict[tuple[int, int], deque[tuple[Wanted, Room]]] = {}
        self._early: dict[tuple[int, int], deque[tuple[int, Room]]] = {}

    def enter(self, epoch: int) -> None:
        """Begins the epoch of a new group: forgets all receives, and the messages of older epochs."""
        self.epoch = epoch
        self._posted = {}
        for address, messages in list(self._early.items()):
            kept = deque(each for each in messages if each[0] >= epoch)
            self._early[address] = kept
            if not kept:
                del self._early[address]

    def take_early(self, source: int, key: int) -> Room | None:
        """Returns the message that came before its receive, which need not be posted then; None if none has."""
        early = self._early.get((source, key))
        if not early or early[0][0] != self.epoch:
            return None
        _, room = early.popleft()
        if not early:
            del self._early[source, key]
        return room

    def post(self, source: int, key: int, wanted: Wanted, room: Room) -> None:
        """Posts a receive of which no message has come early, with memory for it."""
        self._posted.setdefault((source, key), deque()).append((wanted, room))

    def room_for(self, source: int, frame: Frame) -> Room | None:
        """Returns the memory of the receive that the message of a frame will meet; None if it has another size."""
        posted = self._posted.get((source, frame.key)) if frame.epoch == self.epoch else None
        return posted[0][1] if posted and len(posted[0][1]) == frame.total else None

    def put(self, source: int, key: int, epoch: int, room: Room) -> Arrival[Wanted, Room] | None:
        """Takes in a whole message; returns it if its receive is posted, keeps it if it may still be."""
        if epoch < self.epoch:
            return None
        posted = self._posted.get((source, key))
        if epoch > self.epoch or not posted:
            self._early.setdefault((source, key), deque()).append((epoch, room))
            return None
        return Arrival(source, key, posted.popleft()[0], room)

    def awaits(self, source: int) -> bool:
        """Returns whether a receive from a worker is posted, and its message has not come."""
        return any(wanted for (other, _), wanted in self._posted.items() if other == source)

    def forget(self, source: int) -> None:
        """Forgets early messages from a worker whose number another one has now."""
        self._early = {address: each for address, each in self._early.items() if address[0] != source}
