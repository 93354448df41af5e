"""One end of the stream between two hosts: frames in order, each once, also over a connection that broke and came back.

Rules: a frame is kept until the other end says that it has received it. A new connection begins with the number of
frames that have come over those before, and the other end sends again all that follow. Words of an older connection
count for nothing. Any thread may send; frames are taken by one thread at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from engine.core.errors import InvariantError
from engine.core.hosts.bundle import bundled_bytes, fits

MOST_WAITING_BYTES = 64 << 20  # that wait for the other end: it does not read any more


class StreamEnd:
    """The frames to the other end, and the number of those that have come from it."""

    def __init__(self) -> None:
        self.received = 0
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        self._unheard: deque[bytes] = deque()
        self._first = 0  # the number of the first of them
        self._next = -1  # of the next to send; -1: the other end has not said yet how many it has
        self._bytes = 0
        self._connection = 0
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        """Whether the other end has not read for so long that nothing more is kept for it."""
        return self._bytes > MOST_WAITING_BYTES

    def send(self, frame: bytes) -> None:
        """Sends a frame as soon as there is a connection; drops it if too much waits."""
        with self._changed:
            if not (self._is_closed or self.is_full):
                self._unheard.append(frame)
                self._bytes += len(frame)
                self._changed.notify_all()

    def send_last(self, frame: bytes) -> bool:
        """Sends a frame if there is a connection, and no other frame waits to be sent; returns whether it did."""
        with self._changed:
            is_idle = self._next == self._first + len(self._unheard)
            if is_idle:
                self.send(frame)
            return is_idle and not self._is_closed

    def connect(self) -> int:
        """Begins a connection, and ends the one before; returns its number."""
        with self._taking, self._changed:  # a frame that is being taken counts before the other end asks for the number
            self._connection += 1
            self._next = -1
            self._changed.notify_all()
            return self._connection

    def is_present(self, connection: int) -> bool:
        """Whether no other connection has begun since."""
        return connection == self._connection

    def resume(self, connection: int, received: int) -> None:
        """Lets a connection send all that follows after the frames that the other end has received.

        Raises InvariantError for a number that the other end cannot have received.
        """
        with self._changed:
            if connection == self._connection:
                if received < self._first:
                    raise InvariantError(f"the other end has had {self._first} frames, and says {received}")
                self._forget(received)
                self._next = received
                self._changed.notify_all()

    def forget(self, received: int) -> None:
        """Drops the frames that the other end has received; raises InvariantError for more than were sent."""
        with self._changed:
            self._forget(received)

    def can_resume(self, received: int) -> bool:
        """Whether the other end can have received so many frames; those that it has had before are dropped here."""
        with self._changed:
            return self._first <= received <= self._first + len(self._unheard)

    def _forget(self, received: int) -> None:
        if received > (sent := self._next if self._next >= 0 else self._first + len(self._unheard)):
            raise InvariantError(f"the other end says that it has {received} frames, and {sent} were sent")
        while self._unheard and self._first < received:
            self._bytes -= len(self._unheard.popleft())
            self._first += 1

    def take(self, connection: int, deliver: Callable[[], None]) -> bool:
        """Counts a frame and delivers it; returns False, and does neither, if the connection is not the present one."""
        with self._taking:
            if connection != self._connection or self._is_closed:
                return False
            self.received += 1
            deliver()
            return True

    def settle(self) -> None:
        """Waits for a frame that is being taken; of an end that was closed before, none is taken afterwards."""
        with self._taking:
            pass

    def bundles(self, connection: int) -> Iterator[list[bytes]]:
        """Yields the frames of a connection, as many at a time as are due and fit a bundle.

        Ends when another connection has begun, or this end is closed and all is sent.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over(connection) or self._is_due())
                if connection != self._connection or not self._is_due():
                    return
                found, num_bytes = list[bytes](), 0
                while self._is_due() and fits(num_bytes, due := self._unheard[self._next - self._first]):
                    found.append(due)
                    num_bytes += bundled_bytes(due)
                    self._next += 1
            yield found

    def _is_due(self) -> bool:
        return 0 <= self._next < self._first + len(self._unheard)

    def _is_over(self, connection: int) -> bool:
        return self._is_closed or connection != self._connection

    def close(self) -> None:
        """Takes no more frames; the last ones are sent if there is a connection."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
