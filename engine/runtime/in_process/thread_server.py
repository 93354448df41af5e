"""The fork server of a job in one process: each child is a thread that runs the code of a worker.

The agent, its records, its links and its deadlines are those of every run. These differ: SIGKILL ends a child in its
next wait or before its next action; other signals have no effect; the output of the workers goes to stderr; they all
share the limits, the caches and the modules of this process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import threading
import traceback
from collections.abc import Iterator, Sequence

from engine.core.errors import ExitCode, ensure, required
from engine.core.messages import WelcomeMessage
from engine.runtime.device.device import Device
from engine.runtime.ipc.control import FOREVER_S, Control, Killed, Wakeups
from engine.runtime.ipc.link import Link
from engine.runtime.process.fork_client import Child, ForkServer
from engine.runtime.transport.direct_transport import DirectBackend, DirectJoining, LinkCuts
from engine.runtime.transport.links import Links

# The control of a worker that is a thread: it takes turns with the other workers, and a kill ends it.
#
# Rules: one worker thread runs at a time. It gives its turn up where it waits, and nowhere else: the random streams,
# the gradient mode and the user's code are those of a process, and each action has them to itself. The planner threads
# and the threads that hear the agent run beside it. A kill comes between two actions, or in a wait.


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


_WORKER = "engine.runtime.worker.worker"  # imported late, as the fork server does: it imports torch


class ThreadBackend(DirectBackend):
    """The groups of a worker that is a thread. All workers of one `life` were started together."""

    def __init__(self, life: object, control: ThreadControl, worker: int, device: Device):
        self._of_thread = Links(control)
        self._joinings: list[DirectJoining] = []
        super().__init__(LinkCuts(control), self._of_thread, device)

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


class ThreadChild(Child):
    """A worker thread; its `pid` is the number of the thread, its `pidfd` an event that its end sets."""

    def __init__(self, name: str, fds: Sequence[int], life: object, turn: Turn):
        self._control = ThreadControl(Link.from_fd(os.dup(fds[0])), turn)
        self._fds = [os.dup(fd) for fd in fds[1:4]]  # events, steps, board
        self._life, self._turn = life, turn
        self._backend: ThreadBackend | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        ended_fd = os.eventfd(0)
        self._ended_fd = os.dup(ended_fd)
        self._has_ended = threading.Event()
        self._exit_code = int(ExitCode.INTERNAL)
        self._thread.start()
        super().__init__(name, required(self._thread.native_id, "a thread that runs has a number"), ended_fd)

    def signal(self, number: signal.Signals) -> None:
        """Ends the thread at SIGKILL, in its next wait or before its next action; ignores other signals."""
        if number is signal.SIGKILL:
            self._control.kill()
            if self._backend is not None:
                self._backend.leave()  # it may be joining a group

    def wait(self, timeout_s: float = 0.0) -> int | None:
        """Returns the exit code, -9 if the thread was killed; None if it does not end within `timeout_s`."""
        return self._exit_code if self._has_ended.wait(timeout_s) else None

    def _run(self) -> None:
        events_fd, steps_fd, board_fd = self._fds
        try:
            with self._turn.taken():
                work = importlib.import_module(_WORKER).work
                self._exit_code = work(self._control, (events_fd, steps_fd), board_fd, self._backend_of)
        except Killed:
            self._exit_code = -int(signal.SIGKILL)
        finally:
            self._leave()

    def _backend_of(self, welcome: WelcomeMessage, device: Device) -> ThreadBackend:
        self._backend = ThreadBackend(self._life, self._control, welcome.worker, device)
        return self._backend

    def _leave(self) -> None:
        """Releases all that the end of a process would release."""
        if self._backend is not None:
            self._backend.leave()
            self._backend.close()
        self._control.link.socket.shutdown(socket.SHUT_RDWR)  # which ends the thread that listens
        if self._control.recorder is not None:
            self._control.recorder.close()
        for fd in self._fds:
            os.close(fd)
        self._has_ended.set()
        os.eventfd_write(self._ended_fd, 1)
        os.close(self._ended_fd)


class ThreadServer(ForkServer):
    """Starts workers as threads of this process, as a context."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._turn = Turn()
        self._life, self._named = object(), set[str]()

    @property
    def pid(self) -> int:
        """The pid of this process."""
        return os.getpid()

    def has_ended(self) -> bool:
        """Returns False."""
        return False

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """Does nothing: a thread is started at once."""
        yield

    @contextlib.contextmanager
    def adopting(self, preload: tuple[str, ...] = ()) -> Iterator[None]:
        """Does nothing: a thread leaves no process behind, and imports a module once."""
        yield

    def end_descendants(self, patience_s: float = 0.0) -> None:
        """Does nothing: a thread leaves no process behind."""

    def fork(self, role: str, name: str, log_fd: int, fds: Sequence[int] = ()) -> Child:
        """Starts a thread that runs a worker; `fds` begin with those of its link, records and progress board.

        A name that was there before begins a new life of all workers, who form groups with each other only.
        """
        ensure(role == "worker", f"a thread runs a worker, not {role}")
        if name in self._named:
            self._life, self._named = object(), set()
        self._named.add(name)
        self._children.append(ThreadChild(name, fds, self._life, self._turn))
        return self._children[-1]

    def close(self) -> None:
        """Ends the threads."""
        for child in self._children:
            child.close()
