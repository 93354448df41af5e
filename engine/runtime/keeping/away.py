"""A process that works on a disk for this one, which can give it up: the base of the keeper and of the scribe.

Rule: no signal, and not even SIGKILL, ends a process that waits for a disk which has stopped. So this process waits for
that one instead, gives it up after a limit, and can end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

from engine.core.errors import (
    BambooError,
    EnvironmentLacksError,
    NothingMatchedError,
    Problem,
    StorageError,
    UserError,
    required,
)
from engine.files.atomic_write import of_system
from engine.runtime.process.fork_client import Child
from engine.runtime.process.prctl import blank_environment, name_process

LIMIT_S = 30.0  # for a disk to answer
READ_LIMIT_S = 600.0  # for every byte of a checkpoint
_LEAVE_S = 0.3  # from the end of its work to the end of the process
_GONE_S = 1.0  # the same, from SIGKILL
_OF_THIS_PROCESS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)  # with handlers that a fork inherits
StartAway = Callable[[int], Child | None]  # gets the far end of a socket; a thread of this process is no child
_CLASSES: Mapping[int, type[BambooError]] = {
    each.exit_code: each for each in (StorageError, NothingMatchedError, EnvironmentLacksError)
}  # of the errors that a process tells; others are mistakes of the user


class Away:
    """The near end of such a process, which `start` starts."""

    def __init__(self, start: StartAway):
        self.why = ""  # it was given up, or has ended
        self._start = start
        self._child: Child | None = None
        self.near: socket.socket | None = None

    def begin(self) -> None:
        """Starts the process; raises BambooError if that cannot be done."""
        near, far = socket.socketpair()
        with far, contextlib.ExitStack() as unless_started:
            unless_started.callback(near.close)
            self._child = self._start(far.fileno())
            unless_started.pop_all()
        self.near, self.why = near, ""

    def give_up(self, why: str, patience_s: float = _GONE_S) -> str:
        """Kills the process, and lets no thread wait for it; returns its name if SIGKILL does not end it in time."""
        self.why = why
        if self.near is not None:
            with contextlib.suppress(OSError):
                self.near.shutdown(socket.SHUT_RDWR)
        if self._child is None:
            return ""
        self._child.signal(signal.SIGKILL)
        return f"{self._child.name} (pid {self._child.pid})" if self._child.wait(patience_s) is None else ""

    def close(self) -> None:
        """Ends the process, unless it was given up."""
        if self.near is not None:
            self.near.close()
        if self._child is not None:
            self._child.wait(0.0 if self.why else _LEAVE_S)
            self._child.close(0.0)
        self.near = self._child = None


def line(plain: Any) -> bytes:
    """Returns a question or an answer as its line of JSON."""
    return json.dumps(plain).encode() + b"\n"


def told(error: Exception) -> list[Any]:
    """Returns an error as plain values."""
    error = of_system(error) if isinstance(error, OSError) else error
    problems = [asdict(each) for each in error.problems] if isinstance(error, UserError) else []
    code = error.exit_code if isinstance(error, BambooError) else StorageError.exit_code
    return [int(code), str(error) or repr(error), problems]


def heard(plain: list[Any]) -> BambooError:
    """Returns the error that another process has told."""
    code, text, problems = plain
    if problems:
        return UserError(Problem(**each) for each in problems)
    return _CLASSES[code](text) if code in _CLASSES else BambooError(text, code)


def forked(name: str, work: Callable[[int], object]) -> StartAway:
    """Returns the start of a fork of this process that does a work, to which it gives the far end; it is quick.

    The fork does not end with this process, so that it can complete its work; its socket tells it of that end.
    """

    def start(fd: int) -> Child:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THIS_PROCESS)
        try:
            if (pid := os.fork()) == 0:
                _become(name, work, fd)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Child(name, pid, os.pidfd_open(pid))

    return start


def threaded(name: str, work: Callable[[int], object]) -> StartAway:
    """Returns the start of a thread of this process instead, which no limit can end."""
    return lambda fd: threading.Thread(target=work, args=(os.dup(fd),), name=name, daemon=True).start()


def _become(name: str, work: Callable[[int], object], fd: int) -> NoReturn:
    """Does the work in the fork: with no signal, no terminal and no descriptor of this process but one."""
    try:
        for number in _OF_THIS_PROCESS:
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        os.closerange(3, fd)
        os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
        gc.freeze()  # an object of this process that is collected there would close a descriptor with its number
        name_process(name)
        blank_environment()
        work(fd)
    finally:
        os._exit(0)


def answered(place: str, work: Callable[[], Any], limit_s: float = 0.0) -> Any:
    """Returns the result of a work on a disk, plain values, which a fork of this process does.

    Raises the errors of the work, and StorageError if `place`, on that disk, does not answer within the limit, by
    default `LIMIT_S`.
    """

    def tell(fd: int) -> None:
        with socket.socket(fileno=fd) as near:
            try:
                answer = [work(), None]
            except Exception as error:  # told, not handled
                answer = [None, told(error)]
            near.sendall(line(answer))

    away = Away(forked("bamboo-reader", tell))
    away.begin()
    try:
        return _answer_of(away, place, limit_s or LIMIT_S)
    finally:
        away.close()


def _answer_of(away: Away, place: str, limit_s: float) -> Any:
    near, answer = required(away.near, "the process has begun"), b""
    near.settimeout(limit_s)
    try:
        answer = b"".join(iter(partial(near.recv, 1 << 16), b""))
    except TimeoutError:
        why = f"{place!r} has not answered for {limit_s:g} s"
        left = away.give_up(why)
        raise StorageError(f"{why}; {left} does not end by SIGKILL: left behind" if left else why) from None
    if not answer:
        raise StorageError(f"the process that reads {place!r} has ended")
    value, error = json.loads(answer)
    if error is not None:
        raise heard(error)
    return value
