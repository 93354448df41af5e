"""Ctrl-C, SIGTERM and SIGHUP to a launcher: the answer to the user, and an end within a limit.

    first signal    "stopping; Ctrl-C again kills" on stderr. Then the innermost block decides: `holding` notes the
                    signal, and its run ends; `raising` raises SystemExit; outside of both the process ends at once
    second signal   a run kills its workers at once
    third signal    the process ends at once, and the kernel kills its children with it; the same happens `_LIMIT_S`
                    after the first signal, and `_AGAIN_S` after the second, `_LONG_AGAIN_S` on one of several hosts

Rules: in a `holding` block only a wait inside `breakable` raises. An exception at any other place could leave half-made
resources behind, and Python drops an exception that comes in a destructor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from engine.core.errors import BambooError, required
from engine.runtime.process.early_sigint import leave, tell

_TAKEN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PICTURE_S = 0.15  # a live table has this time to show the answer: written by a handler it would spoil the table
_LIMIT_S = 4.0  # every wait ends sooner; this is for a process that its host does not let run
_LONG_LIMIT_S = 15.0  # in a `raising` block, whose children may be programs of others
_AGAIN_S = 1.0
_LONG_AGAIN_S = 10.0  # for a host of several, which hands over when its workers have been killed
_RITES_S = 0.5
_MOST_TO_LEAVE_S = 86_400.0  # the coordinator ends workers after their grace
STEP_GRACE_S = 1.0  # for the open step of an interrupted run

Act = Callable[[signal.Signals], object]


class RunInterruptedError(BambooError):
    """A signal has asked this process to end, and a wait was broken off."""

    def __init__(self, number: signal.Signals):
        super().__init__(f"interrupted by {number.name}", 128 + number)
        self.number = number


class Interrupts:
    """The signals that have asked this process to end."""

    def __init__(self, on_first: Act) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.first: signal.Signals | None = None
        self._on_first = on_first
        self.step_grace_s = STEP_GRACE_S
        self.limit_s = _LIMIT_S
        self.patience_s = 0.0  # from the first signal until a wait is broken off
        self.again_s, self.again_breaks = _AGAIN_S, True  # after the second one; it breaks waits off at once
        self.has_picture = False  # a live table is on the terminal, and shows the answer
        self.is_answered = False
        self._last_rites: list[Act] = []
        self._count = 0
        self._first_s = self._last_s = 0.0
        self._is_waiting = False

    def answer_by(self, act: Act) -> Act:
        """Answers the first signal by `act` from now on; returns what did before."""
        before, self._on_first = self._on_first, act
        return before

    def close(self) -> None:
        """Closes its descriptors."""
        os.close(self._read_fd)
        os.close(self._write_fd)

    def fileno(self) -> int:
        """Returns the descriptor that is readable if a signal has come that `take` has not returned."""
        return self._read_fd

    def take(self) -> signal.Signals:
        """Returns the oldest signal that has come; raises BlockingIOError if there is none."""
        return signal.Signals(os.read(self._read_fd, 1)[0])

    def check(self) -> None:
        """Raises RunInterruptedError if a signal has come."""
        if self.first is not None:
            raise RunInterruptedError(self.first)

    @contextlib.contextmanager
    def breakable(self) -> Iterator[None]:
        """Raises RunInterruptedError out of the block, a wait, when a signal has come `patience_s` seconds ago.

        In another thread than the main one, in which handlers run, it does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, self._is_waiting = self._is_waiting, True
        try:
            if self.first is not None:
                self._act()
            yield
        finally:
            self._is_waiting = before

    def picture_ends(self) -> None:
        """Gives an answer that the live table has not shown yet."""
        self.has_picture = False
        if self.first is not None:
            self.answer()

    def answer(self) -> None:
        """Tells the user once that the signal was heard."""
        if not self.is_answered:
            self.is_answered = True
            tell()

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal that asks this process to end."""
        self._count += 1
        self._last_s = time.monotonic()
        with contextlib.suppress(BlockingIOError):  # the reader has enough of them
            os.write(self._write_fd, bytes([number]))
        if self.first is None:
            self.first, self._first_s = signal.Signals(number), self._last_s
            signal.signal(signal.SIGALRM, lambda number, frame: self._act())
            self._act()
            self._on_first(self.first)
        else:
            self._act()

    @property
    def due_s(self) -> float:
        """When the process ends by force, on the clock of `time.monotonic`, by the limits as they are now."""
        return self._last_s + {1: self.limit_s, 2: self.again_s}.get(self._count, 0.0)

    def _act(self) -> None:
        """Does all that is due after a signal, and sets the alarm for the next."""
        first = required(self.first, "a signal has come")
        now_s = time.monotonic()
        if now_s >= self.due_s:
            self._end_by_force(first)
        answers_s = self._first_s + (_PICTURE_S if self.has_picture else 0.0)
        if now_s >= answers_s:
            self.answer()
        breaks_s = self._first_s + (0.0 if self._count > 1 and self.again_breaks else self.patience_s)
        signal.setitimer(
            signal.ITIMER_REAL, min(each - now_s for each in (answers_s, breaks_s, self.due_s) if each > now_s)
        )
        if self._is_waiting and now_s >= breaks_s:
            raise RunInterruptedError(first)

    def let_wait(self) -> None:
        """Breaks nothing off any more: signals wait for `take`, as they may be notices, and the run continues."""
        self.limit_s = self.patience_s = _MOST_TO_LEAVE_S
        self.again_s, self.again_breaks = _LONG_AGAIN_S, False

    @contextlib.contextmanager
    def forcing(self, last_rites: Act) -> Iterator[None]:
        """Runs `last_rites` before an end by force inside the block, in which waits are broken off at once at first."""
        self._last_rites.append(last_rites)
        self.patience_s = 0.0
        try:
            yield
        finally:
            self._last_rites.pop()

    def _end_by_force(self, number: signal.Signals) -> NoReturn:
        signal.signal(signal.SIGALRM, lambda number, frame: os._exit(128 + int(self.first or number)))
        signal.setitimer(signal.ITIMER_REAL, _RITES_S)
        while self._last_rites:
            with contextlib.suppress(Exception):
                self._last_rites.pop()(number)
        os._exit(128 + number)


_present: list[Interrupts] = []  # one, or none in a process that handles signals itself


def answer_signals() -> None:
    """Makes this process answer the signals from now on; outside of `holding` and `raising` the first one ends it."""
    interrupts = Interrupts(leave)
    _present.append(interrupts)
    for number in _TAKEN:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks for
            signal.signal(number, interrupts.hear)


@contextlib.contextmanager
def holding() -> Iterator[Interrupts]:
    """Inside the block the first signal is noted, and the block ends its run; use it in the main thread."""
    with _acting(lambda number: None) as interrupts:
        yield interrupts


@contextlib.contextmanager
def raising() -> Iterator[Interrupts]:
    """Inside the block the first signal raises SystemExit, so that each `finally` runs."""
    with _acting(lambda number: sys.exit(128 + number)) as interrupts:
        interrupts.limit_s = _LONG_LIMIT_S
        yield interrupts


def present() -> Interrupts | None:
    """Returns the signals to this process, or None if it handles signals itself."""
    return _present[0] if _present else None


def breakable() -> contextlib.AbstractContextManager[None]:
    """Returns the block of a wait that a signal may break off, see `Interrupts.breakable`."""
    return _present[0].breakable() if _present else contextlib.nullcontext()


def rest(seconds: float) -> None:
    """Sleeps, until a signal breaks it off."""
    with breakable():
        time.sleep(seconds)


@contextlib.contextmanager
def _acting(act: Act) -> Iterator[Interrupts]:
    before = {number: signal.getsignal(number) for number in (*_TAKEN, signal.SIGALRM, signal.SIGCHLD)}
    is_outermost = not _present
    if is_outermost:
        answer_signals()
    interrupts = _present[0]
    act_before = interrupts.answer_by(act)
    if before[signal.SIGCHLD] is signal.SIG_IGN:  # the kernel would drop the exit codes of children
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield interrupts
    finally:
        interrupts.answer_by(act_before)
        if act_before is leave:  # this process ends now; at the end of Python an alarm would kill it
            signal.setitimer(signal.ITIMER_REAL, 0)
        if is_outermost:  # this process is a library's or a test's, which handles signals itself
            for number, handler in before.items():
                signal.signal(number, handler)
            _present.remove(interrupts)
            interrupts.close()


@contextlib.contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Blocks Ctrl-C while a child starts: it would kill a child that has not left the terminal's session yet.

    The child inherits the block and calls `ignore_ctrl_c` in its own session.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ctrl_c() -> None:
    """Ignores Ctrl-C, also one that came while it was blocked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
