"""A worker that is a thread: its control, its turn, its links, and what the end of a process does.

Rules: one worker thread runs at a time. It gives its turn up where it waits, and nowhere else: the random streams,
the gradient mode and the user's code are those of a process, and each action has them to itself. The planner threads
and the threads that hear the agent run beside it. A kill comes between two actions, or in a wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import traceback
from collections.abc import Iterator, Sequence

from engine.core.messages import WelcomeMessage
from engine.runtime.device.device import Device
from engine.runtime.process.control import FOREVER_S, Control, ControlHandler, Killed, Wakeups
from engine.runtime.process.link import Link
from engine.runtime.transport.direct_transport import DirectBackend, DirectJoining, LinkCuts
from engine.runtime.transport.links import Links
from engine.runtime.worker.worker import WorkerRun, carries_sizes


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

    def __init__(self, link: Link, turn: Turn, worker: ControlHandler):
        self._is_killed, self.turn = threading.Event(), turn
        super().__init__(link, worker, _TurnWakeups(turn, self._is_killed))

    def _listen(self) -> None:
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


class ThreadBackend(DirectBackend):
    """The groups of a worker that is a thread. All workers of one `life` were started together."""

    def __init__(
        self, life: object, control: ThreadControl, worker: int, device: Device, *, carries_sizes: bool = False
    ):
        self._of_thread = Links(control)
        self._joinings: list[DirectJoining] = []
        super().__init__(LinkCuts(control), self._of_thread, device, carries_sizes=carries_sizes)

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> DirectJoining:
        """Returns the attempt to join the group of an epoch."""
        self._joinings.append(made := super().joining(epoch, members, attempt))
        return made

    def leave(self) -> None:
        """Ends the waits of joining; any thread may call it."""
        for each in list(self._joinings):
            each.abandon()

    def close(self) -> None:
        """Closes the links, as the end of a process does."""
        self._of_thread.close()


class WorkerThread:
    """A worker in a thread, with those of its `life`; `fds` has its link, the records and the progress board."""

    def __init__(self, fds: Sequence[int], life: object, turn: Turn):
        link, *own = (os.dup(fd) for fd in fds[:4])
        self._fds = events_fd, steps_fd, board_fd = own
        self._worker = WorkerRun((events_fd, steps_fd), board_fd)
        self._control = ThreadControl(Link.from_fd(link), turn, self._worker)
        self._life = life
        self._backend: ThreadBackend | None = None

    def run(self) -> int:
        """Runs it to its end, and releases all that the end of a process would release; returns its exit code."""
        try:
            with self._control.turn.taken():
                return self._worker.run(self._control, self._backend_of)
        except Killed:
            return -int(signal.SIGKILL)
        finally:
            if self._backend is not None:
                self._backend.leave()
                self._backend.close()
            self._control.link.socket.shutdown(socket.SHUT_RDWR)  # which ends the thread that listens
            self._worker.close()
            for fd in self._fds:
                os.close(fd)

    def kill(self) -> None:
        """Ends it in its next wait, or before its next action; any thread may call this."""
        self._control.kill()
        if self._backend is not None:
            self._backend.leave()  # it may be joining a group

    def _backend_of(self, welcome: WelcomeMessage, device: Device) -> ThreadBackend:
        of_job = carries_sizes(welcome)
        self._backend = ThreadBackend(self._life, self._control, welcome.worker, device, carries_sizes=of_job)
        return self._backend
