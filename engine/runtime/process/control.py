"""A worker's control thread receives the agent's messages, even while the main thread is blocked.

Rules: the main thread waits in one place only. Arriving transfers and messages of the agent wake it there, so the
control thread can interrupt any wait: until the main thread has taken an urgent message, every wait ends with `Fenced`
or `Stopped`. A message of the worker belongs to the epoch that it has entered.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import signal
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from engine.core.errors import ExitCode
from engine.core.message_kinds import Message, ToAgent, ToWorker
from engine.core.messages import (
    ArmMessage,
    EpochMessage,
    FiredMessage,
    HeartbeatMessage,
    InflictMessage,
    KeyMessage,
    LinkMessage,
    MarkMessage,
    NextGroupMessage,
    OwnPhase,
    PingMessage,
    StopMessage,
)
from engine.core.program.inventory import PrepareMessage, PreparePartMessage
from engine.core.protocol.state import LEAST_QUIET_NS
from engine.core.protocol.worker_inputs import Inbox, arrived, taken, without
from engine.runtime.process.link import Link

# The one wait of a worker's main thread, for its links and for news from other threads.
#
#     wake()      from any thread: the main thread looks again
#     watch(fd)   when the descriptor is readable or writable, the main thread handles it in its wait
#
# Rule: a source is handled only while the main thread waits or looks.


OnReady = Callable[[int], object]  # gets the events of `select.epoll`
_RETRY_S = 0.0005  # for a full ring: its reader does not report that there is room again


class Wakeups:
    """The wait of one main thread."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._event, select.EPOLLIN)
        self._handlers: dict[int, OnReady] = {}
        # While one of both has something, the main thread looks regularly as it works.
        self.retries: deque[Callable[[], bool]] = deque()
        self._heeding: list[Callable[[], object]] = []
        self.writing: set[int] = set()  # descriptors that are to become writable
        weakref.finalize(self, _close, self._event, self._poll)

    def wake(self) -> None:
        """Ends the current wait, or the next one; any thread may call it."""
        os.eventfd_write(self._event, 1)

    def watch(self, fd: int, handler: OnReady, *, writable: bool = False) -> None:
        """Calls `handler` when a descriptor is readable, or with `writable` also when it is writable."""
        events = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        (self.writing.add if writable else self.writing.discard)(fd)
        if fd in self._handlers:
            self._poll.modify(fd, events)
        else:
            self._poll.register(fd, events)
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        """Stops watching a descriptor; call it before closing that."""
        self.writing.discard(fd)
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def heed(self, work: Callable[[], object]) -> None:
        """Calls `work` whenever `wake` ends a wait."""
        self._heeding.append(work)

    def retry(self, work: Callable[[], bool]) -> None:
        """Calls `work` in every wait and look until it returns True; any thread may call this, and then wake."""
        self.retries.append(work)

    def look(self) -> bool:
        """Handles all events, without waiting; returns whether there were any."""
        return self._handle(self._poll.poll(0))

    def wait(self) -> None:
        """Waits for events, and handles them."""
        while not self._handle(self.sleep(_RETRY_S if self.retries else None)):
            pass

    def sleep(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Waits for events and returns them by descriptor; none after a timeout."""
        return self._poll.poll(timeout_s)

    def _handle(self, events: list[tuple[int, int]]) -> bool:
        if self.retries:
            self._try_again()
        for fd, mask in events:
            if fd == self._event:
                os.eventfd_read(fd)
                for heed in self._heeding:
                    heed()
            elif (handler := self._handlers.get(fd)) is not None:  # an earlier one may have forgotten it
                handler(mask)
        return bool(events)

    def _try_again(self) -> None:
        for _ in range(len(self.retries)):
            work = self.retries.popleft()
            if not work():
                self.retries.append(work)


def _close(event: int, poll: select.epoll) -> None:
    poll.close()
    os.close(event)


# A worker's notice by SIGTERM.
#
#     a thread that blocks it    the signal is pending, and the thread `notice` takes it
#     a thread that does not     of a library or the user: a handler writes a byte, which the thread `notice-byte` reads
#
# Rules: the process blocks the signal before it has other threads, so later threads inherit that. A thread may still
# unblock it: without a handler the signal would end the process there. A handler in Python runs in the main thread,
# which may compute for long, so the interpreter's own handler writes the byte. A process forked by the worker gives it
# no notice.

NOTICE = signal.SIGTERM  # its sender will end the worker soon


def give_notice_of_sigterm(give: Callable[[], None]) -> None:
    """Starts threads that call `give` at each SIGTERM, even while the main thread, which calls this, is blocked."""
    bytes_of, written = os.pipe()
    os.set_blocking(written, False)
    signal.signal(NOTICE, lambda number, frame: None)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)

    def listen() -> None:
        while True:
            signal.sigwait({NOTICE})
            give()

    def read() -> None:
        while byte := os.read(bytes_of, 1):
            if byte[0] == NOTICE:  # other signals with a handler write theirs too
                give()

    threading.Thread(target=listen, name="notice", daemon=True).start()
    threading.Thread(target=read, name="notice-byte", daemon=True).start()


def _forget() -> None:
    """Restores the signal in a forked process, whose byte would be a notice for the worker."""
    signal.set_wakeup_fd(-1)
    signal.signal(NOTICE, signal.SIG_DFL)


class RendezvousClient:
    """The keys that the members of current epochs exchange through the agent, to find each other.

    A wait ends at once when its epoch is over, its group is given up, or this worker has to stop. Any thread may call.
    """

    def __init__(self) -> None:
        self._over: float = -1  # the highest epoch that is over
        self._values: dict[tuple[int, str], str] = {}
        self._given_up: set[tuple[int, str]] = set()  # groups of epochs that are not over
        self._changed = threading.Condition()

    def put(self, epoch: int, key: str, value: str) -> None:
        """Sets a key, which is ignored if its epoch is over."""
        with self._changed:
            if epoch > self._over:
                self._values[epoch, key] = value
                self._changed.notify_all()

    def end(self, epoch: float = math.inf) -> None:
        """Ends the waits of an epoch and of lower ones, and forgets their keys; by default those of all epochs."""
        with self._changed:
            self._over = max(epoch, self._over)
            self._values = {key: value for key, value in self._values.items() if key[0] > self._over}
            self._given_up = {group for group in self._given_up if group[0] > self._over}
            self._changed.notify_all()

    def give_up(self, epoch: int, group: str) -> None:
        """Ends every wait for keys of one group of an epoch."""
        with self._changed:
            self._given_up.add((epoch, group))
            self._changed.notify_all()

    def wait(self, epoch: int, group: str, names: Sequence[str], timeout_s: float) -> list[str]:
        """Returns the values of all keys of a group once they are set.

        Raises RuntimeError if `epoch` is over, if the group is given up, or after a time.
        """
        keys = [f"{group}/{name}" for name in names]
        complete = {(epoch, key) for key in keys}

        def is_over() -> bool:
            return epoch <= self._over or (epoch, group) in self._given_up

        with self._changed:
            in_time = self._changed.wait_for(lambda: is_over() or self._values.keys() >= complete, timeout_s)
            if is_over():
                raise RuntimeError(f"epoch {epoch} is over" if epoch <= self._over else f"group {group} was given up")
            if not in_time:
                raise RuntimeError(f"no worker has set {', '.join(keys)} in time")
            return [self._values[epoch, key] for key in keys]


Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=ToWorker)

FOREVER_S = 1_000_000.0
_LOOK_S = 0.002  # between two looks for the order to stop


class Stopped(Exception):
    """The agent has ordered this worker to stop; raised out of any wait."""


class Fenced(Exception):
    """There is a newer epoch than this worker's; raised out of any wait."""


class Killed(BaseException):
    """A worker that is a thread has been killed: none of its code may continue, and it sends nothing."""


ReadCounts = Callable[[], Mapping[int, tuple[int, int, int]]]  # returns counts by member: sent, posted, received


class ControlHandler:
    """The worker behind a control; this one does nothing, as a worker that lacks the part that a method is about."""

    def pinged(self) -> None:
        """Handles a ping after its answer, in the control thread."""

    def prepare(self, order: PrepareMessage | PreparePartMessage | NextGroupMessage) -> None:
        """Handles an order about a coming epoch, in the control thread."""

    def harm(self, order: ArmMessage | InflictMessage) -> None:
        """Handles a message about faults, in the main thread; it may raise anything, or end the process."""

    def moved(self, epoch: int, step: int, index: int, inside: bool, num_computed: int = 0, action: str = "") -> None:
        """Handles a move of the main thread, in it; without an action it begins none."""

    def is_owing(self) -> bool:
        """Whether this worker's own device keeps a message: its main thread is inside of something, and may hang."""
        return False

    def unfinished(self) -> str:
        """Returns the name of this worker's GPU if that has not ended its work; called in the control thread."""
        return ""


class Control:
    """The worker's end of its link to the agent; `handler` is told what the main thread does not wait for."""

    def __init__(self, link: Link, handler: ControlHandler | None = None, wakeups: Wakeups | None = None):
        self.link = link
        self.handler = handler or ControlHandler()
        self.keys = RendezvousClient()
        self.wakeups = wakeups or Wakeups()
        self.given_links: queue.SimpleQueue[tuple[LinkMessage, list[int]]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the inbox
        self.inbox = Inbox()
        self._is_urgent = False  # whether the first message interrupts the main thread
        self.accepted = 0  # the epoch that this worker has entered
        self.fired: set[str] = set()  # ids of the faults that have struck any worker
        self._of_faults: list[ArmMessage | InflictMessage] = []
        self.tells_marks = False  # whether some fault waits for a phase that only workers know about
        self._at = (0, 0, False)
        self._waits_since_ns = 0  # when the main thread began to wait for news, 0 if it does not wait
        self._traffic: tuple[int, ReadCounts] = (0, dict)  # (epoch, its counts)
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    @property
    def at(self) -> tuple[int, int, bool]:
        """The step, the actions and waits begun in it, and whether inside the last of them; set by the main thread.

        Heartbeats must not go backwards: the number keeps counting through all programs of a step.
        """
        return self._at

    @at.setter
    def at(self, at: tuple[int, int, bool]) -> None:
        self._at = at
        self.handler.moved(self.accepted, *at)

    def begin(self, step: int, inside: bool, num_computed: int, action: str) -> None:
        """Records that the main thread begins an action of a step; `inside` if it waits for no other worker there."""
        before, number, _ = self._at
        number = number + 1 if step == before else 1
        self._at = (step, number, inside)
        self.handler.moved(self.accepted, step, number, inside, num_computed, action)

    def leave(self, step: int) -> None:
        """Records that the last action of a step is over, as the begin of the next one also does."""
        before, number, _ = self._at
        self.at = (step, number if step == before else 0, False)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Marks a block in which the main thread waits for no other worker, and so may hang."""
        step, number, inside = self.at
        if inside:
            yield
            return
        self.at = (step, number + 1, True)
        try:
            yield
        finally:
            self.at = (step, number + 1, False)

    def stand_still(self, seconds: float = FOREVER_S) -> None:
        """Hangs in the main thread, like a wait that nothing ends."""
        time.sleep(seconds)

    def _listen(self) -> None:
        """Handles messages until the agent ends or sends a malformed one; then the worker exits."""
        try:
            while (message := (received := self.link.receive_with_fds())[0]) is not None:
                self._take_in(message, received[1])
        except Exception:
            traceback.print_exc()  # to the worker's log
        os._exit(ExitCode.INTERNAL)

    def _take_in(self, message: Message, fds: list[int]) -> None:
        match message:
            case LinkMessage():
                self.given_links.put((message, fds))
            case PingMessage():
                self.send(self._heartbeat())
                self.handler.pinged()
                return
            case PrepareMessage() | PreparePartMessage() | NextGroupMessage():
                self.handler.prepare(message)
                return
            case KeyMessage():
                self.keys.put(message.epoch, message.key, message.value)
                return
            case FiredMessage():
                self.fired.add(message.fault)
            case ArmMessage() | InflictMessage():
                self._of_faults.append(message)
            case ToWorker():
                with self._lock:
                    self._keep(arrived(self.inbox, message))
                if isinstance(message, StopMessage):
                    self.keys.end()
                elif isinstance(message, EpochMessage):
                    self.keys.end(self.inbox.epoch - 1)
        self.wake()

    def _keep(self, inbox: Inbox) -> None:
        self.inbox, self._is_urgent = inbox, inbox.is_urgent

    def _heartbeat(self) -> HeartbeatMessage:
        since_ns, at = self._waits_since_ns, self._at
        quiet_ns = time.monotonic_ns() - since_ns if since_ns else 0
        epoch, traffic = self._traffic
        if quiet_ns < LEAST_QUIET_NS or at[2] or epoch != self.accepted:
            return HeartbeatMessage(self.accepted, *at, device=self.handler.unfinished() if at[2] else "")
        counts = tuple((peer, *numbers) for peer, numbers in traffic().items())
        return HeartbeatMessage(self.accepted, *at, quiet_ns, counts)

    def send(self, message: ToAgent) -> None:
        """Sends a message to the agent; nothing happens if the agent is gone."""
        self.link.send(message)

    def mark(self, phase: OwnPhase) -> None:
        """Reports that this worker has reached a phase of a recovery, if a fault waits for that."""
        if self.tells_marks:
            self.send(MarkMessage(self.accepted, phase))

    def wake(self) -> None:
        """Makes the main thread look again; any thread calls it after a change that the main thread waits for."""
        self.wakeups.wake()

    def wait_until(self, look: Callable[[], Value | None]) -> Value:
        """Waits until `look`, called again after any news, returns a value; raises Stopped or Fenced."""
        self.check()
        while (value := look()) is None:
            self._await_news()
            if self._is_urgent or self._of_faults:  # the wait itself has done what else a check does
                self.check()
        return value

    def count(self, traffic: ReadCounts) -> None:
        """Adds the counts of this epoch's group to heartbeats while the main thread waits without news."""
        self._traffic = (self.accepted, traffic)

    def _await_news(self) -> None:
        self._waits_since_ns = time.monotonic_ns()
        if self.handler.is_owing():
            with self.busy():
                self.wakeups.wait()
        else:
            self.wakeups.wait()
        self._waits_since_ns = 0

    def hear(self, look: Callable[[], Value | None] = lambda: None, *, urgent: bool = False) -> ToWorker | Value:
        """Waits for the first message of the inbox, or for a value from `look`, and returns it.

        With `urgent`, only a message that interrupts is taken.
        """
        while True:
            self._suffer()
            if self._is_urgent or (self.inbox.waiting and not urgent):
                with self._lock:
                    message, inbox = taken(self.inbox)
                    self._keep(inbox)
                return message
            value = look()
            if value is not None:
                return value
            self._await_news()

    def await_stop(self, limit_s: float) -> StopMessage | None:
        """Waits for the order to stop, and returns it; None after a time. Nothing else ends this wait."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            with self._lock:
                stop = next((each for each in self.inbox.waiting if isinstance(each, StopMessage)), None)
            if stop is not None:
                return stop
            time.sleep(_LOOK_S)
        return None

    def take(self, kind: type[Kind]) -> Kind:
        """Waits for the next message of a kind and returns it; raises Stopped or Fenced."""

        def look() -> Kind | None:
            with self._lock:
                message = next((message for message in self.inbox.waiting if isinstance(message, kind)), None)
                if message is not None:
                    self._keep(without(self.inbox, message))
                return message

        return self.wait_until(look)

    def check(self) -> None:
        """Raises Stopped if this worker has to stop, Fenced if there is a newer epoch.

        It also sends messages that wait for room and adopts new links, for actions that do not wait. Before that it
        carries out the agent's messages about faults, which may raise anything, or end the process.
        """
        if self._of_faults:
            self._suffer()
        wakeups = self.wakeups
        if wakeups.retries or wakeups.writing or not self.given_links.empty():
            wakeups.look()
        if self._is_urgent:
            raise Stopped if isinstance(self.inbox.waiting[0], StopMessage) else Fenced

    def _suffer(self) -> None:
        while self._of_faults:
            self.handler.harm(self._of_faults.pop(0))
