"""Works that a process away does for this one, in their order: told without waiting, or asked for and awaited.

Rules: a disk that has not answered within the limit is given up with the process: the works that are missing are named,
and every later question fails at once. The first error of a work that was told is raised at the next look.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from engine.core.errors import BambooError, Problem, StorageError, UserError, error_of_code, required
from engine.core.texts import counted, exit_text
from engine.files.atomic_write import of_system
from engine.runtime.process.fork_client import Child
from engine.runtime.process.prctl import blank_environment, name_process

# A process that works on a disk for this one, which can give it up: the base of the keeper and of the scribe.
#
# Rule: no signal, and not even SIGKILL, ends a process that waits for a disk which has stopped. So this process waits
# for that one instead, gives it up after a limit, and can end.


LIMIT_S = 30.0  # for a disk to answer
READ_LIMIT_S = 600.0  # for every byte of a checkpoint
_LEAVE_S = 0.3  # from the end of its work to the end of the process
_CHILD_GONE_S = 1.0  # the same, from SIGKILL
_OF_THIS_PROCESS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)  # with handlers that a fork inherits
StartAway = Callable[[int], Child | None]  # gets the far end of a socket; a thread of this process is no child


class HelperProcess:
    """The near end of such a process, which `start` starts."""

    def __init__(self, start: StartAway):
        self.why = self.left = ""  # it was given up, or has ended; its name, if it survived SIGKILL then
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

    def give_up(self, why: str, patience_s: float = _CHILD_GONE_S) -> str:
        """Kills the process, and lets no thread wait for it; returns its name if SIGKILL does not end it in time."""
        self.why = why
        if self.near is not None:
            with contextlib.suppress(OSError):
                self.near.shutdown(socket.SHUT_RDWR)
        if self._child is None:
            return ""
        self._child.signal(signal.SIGKILL)
        return f"{self._child.name} (pid {self._child.pid})" if self._child.wait(patience_s) is None else ""

    def exchange(self, question: bytes, place: str, limit_s: float | None) -> bytes:
        """Returns the line that answers a question; not a whole one if the process has ended, or was given up.

        It is given up if the disk with `place` does not answer in time: `why` says so, and `left` names it if it stays.
        """
        if (near := self.near) is None:
            return b""
        answer = b""
        try:
            near.settimeout(limit_s)
            if question:  # a process that has answered and ended takes none
                near.sendall(question)
            while not answer.endswith(b"\n") and (more := near.recv(1 << 16)):
                answer += more
        except TimeoutError:
            self.left = self.give_up(f"{place!r} has not answered for {limit_s or 0.0:g} s")
        except OSError:  # it has ended, or was given up
            return b""
        return answer

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
    return error_of_code(code, text)


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
    code = 1
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
        code = 0
    finally:
        os._exit(code)


def answered(place: str, work: Callable[[], Any], limit_s: float = 0.0) -> Any:
    """Returns the plain result of a work on a disk, done by a fork; raises its errors.

    Raises StorageError if `place`, on that disk, does not answer within the limit, by default `LIMIT_S`.
    """

    def tell(fd: int) -> None:
        with socket.socket(fileno=fd) as near:
            try:
                answer = [work(), None]
            except Exception as error:  # told, not handled
                answer = [None, told(error)]
            near.sendall(line(answer))

    away = HelperProcess(forked("bamboo-reader", tell))
    away.begin()
    try:
        answer = away.exchange(b"", place, limit_s or LIMIT_S)
    finally:
        away.close()
    if away.why:
        raise StorageError(f"{away.why}; {away.left} survived SIGKILL: left behind" if away.left else away.why)
    if not answer.endswith(b"\n"):
        raise StorageError(f"the process that reads {place!r} has ended")
    value, error = json.loads(answer)
    if error is not None:
        raise heard(error)
    return value


ANSWER, GOES_ON, UNASKED = "answer", "goes on", "unasked"  # the kinds of words of that process
RECORD = "record"
_AT_ONCE_S = 0.1  # that a disk has, instead of the limit, while this process ends by force
_GONE_S = 0.15  # from SIGKILL to the end of the process
_PATIENCE_S = 0.02  # that a look waits for a disk that has answered the last one
_STANDS_S = 0.5  # less than a worker may hang: from then on the disk stands
_MOST_BYTES = 64 << 20  # that wait for a disk that does not answer


@dataclass(slots=True)
class _Question:
    """A question without an answer yet; all that was told before it is on disk at its answer."""

    asked_s: float
    limit_s: float
    is_answered: bool = False
    value: Any = None
    error: BambooError | None = None
    fds: tuple[int, ...] = ()


class Orders(HelperProcess):
    """The near end of that process; the main thread begins it. Any thread tells and asks, a handler of signals too."""

    def __init__(self, start: StartAway):
        super().__init__(start)
        self.place = ""  # the folder of the run, or of results
        self._questions: deque[_Question] = deque()
        self._open: deque[_Question | str] = deque()  # all that was told since the last answer, in words
        self._unsent = bytearray()
        self._read = b""
        self._error: BambooError | None = None
        self._touched: _Question | None = None
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Starts the process."""
        super().begin()
        self._near_end.setblocking(False)

    def tell(self, name: str, *arguments: Any, named: str = RECORD) -> None:
        """Sends the name of a work and all that it needs, and does not wait; it is `named` if it is not done."""
        self.send(line([name, False, *arguments]), named)

    def send(self, data: bytes, named: str) -> None:
        """Sends the line of a work, as `tell` does."""
        with self._lock:
            if not self.why:
                self._open.append(named)
                self._send(data)

    def ask(self, name: str, *arguments: Any, named: str = "", limit_s: float = 0.0) -> Any:
        """Returns the answer of a work; raises its error, and StorageError if the disk does not answer in time."""
        return self.question(name, arguments, named, limit_s).value

    @property
    def answers(self) -> bool:
        """Whether the disk has answered at the last looks; a busy machine answers late."""
        last = self._touched
        return last is None or last.is_answered or time.monotonic() - last.asked_s < _STANDS_S

    def look(self) -> bool:
        """Returns whether the disk answers now.

        Raises:
            StorageError: a record could not be written, or the disk has not answered within the limit.
        """
        self._refuse_given_up()
        if self._touched is None or self._touched.is_answered:
            self._touched = self._asked("touch", (), "", 0.0)
            self._hear(_PATIENCE_S)
        else:
            self._hear(0.0)
        if (error := self._error) is not None:
            self._error = None
            raise error
        self._refuse_late()
        return self._touched.is_answered

    def settle(self, *, at_once: bool = False) -> None:
        """Waits until all that was told is done, with `at_once` a moment only; raises StorageError if it is not."""
        self.ask("touch", limit_s=_AT_ONCE_S if at_once else 0.0)
        if (error := self._error) is not None:
            self._error = None
            raise error

    @property
    def _near_end(self) -> socket.socket:
        return required(self.near, "the scribe has begun")

    def question(self, name: str, arguments: tuple[Any, ...], named: str, limit_s: float = 0.0) -> _Question:
        """Returns a question that is answered; raises as `ask` does."""
        self._refuse_given_up()
        begun_s, question = time.monotonic(), self._asked(name, arguments, named, limit_s)
        while not question.is_answered:
            self._refuse_late()
            if question.limit_s == _AT_ONCE_S and time.monotonic() > begun_s + _AT_ONCE_S:
                self._stop_waiting(_AT_ONCE_S)
            self._hear(_AT_ONCE_S / 2)
        if question.error is not None:
            raise question.error
        return question

    def _refuse_late(self) -> None:
        if self._questions and time.monotonic() - self._questions[0].asked_s > self._questions[0].limit_s:
            self._stop_waiting(self._questions[0].limit_s)

    def _asked(self, name: str, arguments: tuple[Any, ...], named: str, limit_s: float) -> _Question:
        question, data = _Question(time.monotonic(), limit_s or LIMIT_S), line([name, True, *arguments])
        with self._lock:
            self._open += [named, question] if named else [question]
            self._questions.append(question)
            self._send(data)
        return question

    def _send(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            self._flush()
        else:
            self._unsent += data[self._sent(data) :]
        if len(self._unsent) > _MOST_BYTES:
            self._give_up_with(f"{self.place!r} does not answer, and {len(self._unsent):,} bytes wait for it")

    def _flush(self) -> None:
        if self._unsent:
            del self._unsent[: self._sent(self._unsent)]

    def _sent(self, data: bytes | bytearray) -> int:
        try:
            return self._near_end.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._lose()
            return len(data)

    def drain(self) -> None:
        """Waits until a part of a large file is with the scribe."""
        if self._unsent:
            self.settle()

    def _hear(self, wait_s: float) -> None:
        """Takes the words that have come, or come within a time, and sends named waits."""
        poll = select.poll()
        poll.register(self._near_end, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        if not poll.poll(wait_s * 1000):
            return
        with self._lock:
            self._flush()
            try:
                data, fds, _, _ = socket.recv_fds(self._near_end, 1 << 16, 2)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._lose()
                raise StorageError(self.why)
            *lines, self._read = (self._read + data).split(b"\n")
            for word in lines:
                kind, value, error = json.loads(word)
                self._take(kind, value, error, fds)

    def _take(self, kind: str, value: Any, error: list[Any] | None, fds: list[int]) -> None:
        if kind == UNASKED and error is not None:
            self._error = self._error or heard(error)
        elif kind == GOES_ON and self._questions:
            self._questions[0].asked_s = time.monotonic()
        elif kind == ANSWER:
            question = self._questions.popleft()
            question.is_answered, question.value, question.fds = True, value, tuple(fds)
            question.error = None if error is None else heard(error)
            while self._open.popleft() is not question:
                pass
            if self._questions:  # it could not be answered before
                self._questions[0].asked_s = time.monotonic()

    def _refuse_given_up(self) -> None:
        if self.why:
            raise StorageError(self.why)

    def _lose(self) -> None:
        if not self.why:
            code = None if self._child is None else self._child.wait(_GONE_S)
            how = "has ended" if code is None else exit_text(code)
            self._give_up_with(f"the process that writes the files of the run {how}")

    def _stop_waiting(self, limit_s: float) -> None:
        self._give_up_with(f"{self.place!r} has not answered for {limit_s:.3g} s")
        raise StorageError(self.why)

    def _give_up_with(self, why: str) -> None:
        left = self.give_up(why, _GONE_S)
        missing = Counter(each for each in self._open if isinstance(each, str) and each)
        words = [counted(missing.pop(RECORD, 0), RECORD)] if missing[RECORD] else []
        words += sorted(missing - Counter({RECORD: 0}))
        self.why += f"; not written: {', '.join(words)}" if words else ""
        self.why += f"; {left} survived SIGKILL: left behind" if left else ""
        self._open.clear()
        self._questions.clear()
        self._unsent.clear()
