"""The control of a worker that is a thread: it takes turns with the other workers, and a kill ends it.

Rules: one worker thread runs at a time. It gives its turn up where it waits, and nowhere else: the random streams, the
gradient mode and the user's code are those of a process, and each action has them to itself. The planner threads and
the threads that hear the agent run beside it. A kill comes between two actions, or in a wait.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator

from engine.runtime.ipc.control import FOREVER_S, Control, Killed
from engine.runtime.ipc.link import Link
from engine.runtime.ipc.wakeups import Wakeups


class Turn:
    """The right to run; one thread has it at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Has the turn inside the block."""
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Gives the turn up inside the block, if this thread has it."""
        if self._holder != threading.get_ident():
            yield
            return
        self._holder = None
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._holder = threading.get_ident()


class ThreadControl(Control):
    """The thread's end of its link to the agent."""

    def __init__(self, link: Link, turn: Turn):
        self._is_killed, self.turn = threading.Event(), turn
        super().__init__(link, _TurnWakeups(turn, self._is_killed))

    def _listen(self) -> None:
        """Handles messages until the link is shut down, and closes it."""
        try:
            while (message := (received := self.link.receive_with_fds())[0]) is not None:
                self._take_in(message, received[1])
        except Exception:
            traceback.print_exc()
            self.kill()
        finally:
            self.link.close()

    def check(self) -> None:
        """Raises Killed, or as the control of a process does."""
        _end_if(self._is_killed)
        super().check()

    def stand_still(self, seconds: float = FOREVER_S) -> None:
        """Lets other threads run meanwhile; raises Killed."""
        with self.turn.paused():
            self._is_killed.wait(seconds)
        _end_if(self._is_killed)

    def kill(self) -> None:
        """Ends the worker in its next wait, or before its next action; any thread may call this."""
        self._is_killed.set()
        self.wake()


class _TurnWakeups(Wakeups):
    """The one wait of a worker that is a thread."""

    def __init__(self, turn: Turn, is_killed: threading.Event):
        super().__init__()
        self._turn, self._is_killed = turn, is_killed

    def sleep(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Waits, and lets other threads run meanwhile; raises Killed."""
        with self._turn.paused():
            came = super().sleep(timeout_s)
        _end_if(self._is_killed)
        return came


def _end_if(is_killed: threading.Event) -> None:
    if is_killed.is_set():
        raise Killed
