"""The one wait of a worker's main thread: for its links, and for news from other threads; an arrival wakes nobody else.

    wake()      from any thread: the main thread looks again
    watch(fd)   what is readable there, or writable, is handled in the main thread, in its wait

Rule: a source is handled while the main thread waits or looks, and never beside it.
"""

from __future__ import annotations

import os
import select
import weakref
from collections import deque
from collections.abc import Callable

OnReady = Callable[[int], object]  # gets the events of `select.epoll`
_RETRY_S = 0.0005  # for a ring that was full: its reader does not tell that there is room again


class Wakeups:
    """The wait of one main thread."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._event, select.EPOLLIN)
        self._handlers: dict[int, OnReady] = {}
        self._retries: deque[Callable[[], bool]] = deque()
        self._heeding: list[Callable[[], object]] = []
        self._writing: set[int] = set()  # descriptors that are to become writable
        weakref.finalize(self, _close, self._event, self._poll)

    def wake(self) -> None:
        """Ends the present wait, or the next one; any thread may call it."""
        os.eventfd_write(self._event, 1)

    def watch(self, fd: int, handler: OnReady, *, writable: bool = False) -> None:
        """Handles a descriptor that is readable, and with `writable` also one that is writable."""
        events = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        (self._writing.add if writable else self._writing.discard)(fd)
        if fd in self._handlers:
            self._poll.modify(fd, events)
        else:
            self._poll.register(fd, events)
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        """Handles a descriptor no more; call it before that is closed."""
        self._writing.discard(fd)
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def heed(self, work: Callable[[], object]) -> None:
        """Calls `work` whenever `wake` has ended a wait."""
        self._heeding.append(work)

    def retry(self, work: Callable[[], bool]) -> None:
        """Calls `work` again and again, in each wait and look, until it returns True; any thread may call, and wake."""
        self._retries.append(work)

    @property
    def owes(self) -> bool:
        """Whether something waits to be written: then the main thread looks now and then while it works."""
        return bool(self._retries or self._writing)

    def look(self) -> bool:
        """Handles all that has come, without a wait; returns whether there was something."""
        return self._handle(self._poll.poll(0))

    def wait(self) -> None:
        """Waits until something has come, and handles it."""
        while not self._handle(self.sleep(_RETRY_S if self._retries else None)):
            pass

    def sleep(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Waits until something has come, and returns it by descriptor; nothing if that takes longer."""
        return self._poll.poll(timeout_s)

    def _handle(self, events: list[tuple[int, int]]) -> bool:
        for _ in range(len(self._retries)):
            work = self._retries.popleft()
            if not work():
                self._retries.append(work)
        for fd, mask in events:
            if fd == self._event:
                os.eventfd_read(fd)
                for heed in self._heeding:
                    heed()
            elif (handler := self._handlers.get(fd)) is not None:  # an earlier one may have forgotten it
                handler(mask)
        return bool(events)


def _close(event: int, poll: select.epoll) -> None:
    poll.close()
    os.close(event)
