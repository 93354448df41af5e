"""Works that a process away does for this one, in their order: told without waiting, or asked for and awaited.

Rules: a disk that has not answered within the limit is given up with the process: the works that are missing are named,
and every later question fails at once. The first error of a work that was told is raised at the next look.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from engine.core.errors import BambooError, StorageError, required
from engine.core.texts import counted
from engine.runtime.keeping import away
from engine.runtime.keeping.away import Away, heard, line

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


class Orders(Away):
    """The near end of that process; the main thread begins it. Any thread tells and asks, a handler of signals too."""

    def __init__(self, start: away.StartAway):
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

    def tell(self, name: str, *given: Any, named: str = RECORD) -> None:
        """Sends the name of a work and all that it needs, and does not wait; it is `named` if it is not done."""
        self.send(line([name, False, *given]), named)

    def send(self, data: bytes, named: str) -> None:
        """Sends the line of a work, as `tell` does."""
        with self._lock:
            if not self.why:
                self._open.append(named)
                self._send(data)

    def ask(self, name: str, *given: Any, named: str = "", limit_s: float = 0.0) -> Any:
        """Returns the answer of a work; raises its error, and StorageError if the disk does not answer in time."""
        return self.question(name, given, named, limit_s).value

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

    def question(self, name: str, given: tuple[Any, ...], named: str, limit_s: float = 0.0) -> _Question:
        """Returns a question that is answered; raises as `ask` does."""
        self._refuse_given_up()
        begun_s, question = time.monotonic(), self._asked(name, given, named, limit_s)
        while not question.is_answered:
            self._refuse_late()
            if question.limit_s == _AT_ONCE_S and time.monotonic() > begun_s + _AT_ONCE_S:
                self._stop_waiting(_AT_ONCE_S)
            self._hear(_AT_ONCE_S / 2)
        if question.error is not None:
            raise question.error
        return question

    def _refuse_late(self) -> None:
        """Gives up a disk whose oldest question is late."""
        if self._questions and time.monotonic() - self._questions[0].asked_s > self._questions[0].limit_s:
            self._stop_waiting(self._questions[0].limit_s)

    def _asked(self, name: str, given: tuple[Any, ...], named: str, limit_s: float) -> _Question:
        question, data = _Question(time.monotonic(), limit_s or away.LIMIT_S), line([name, True, *given])
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
            for each in lines:
                kind, value, error = json.loads(each)
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
            self._give_up_with("the process that writes the files of the run has ended")

    def _stop_waiting(self, limit_s: float) -> None:
        self._give_up_with(f"{self.place!r} has not answered for {limit_s:.3g} s")
        raise StorageError(self.why)

    def _give_up_with(self, why: str) -> None:
        left = self.give_up(why, _GONE_S)
        missing = Counter(each for each in self._open if isinstance(each, str) and each)
        words = [counted(missing.pop(RECORD, 0), RECORD)] if missing[RECORD] else []
        words += sorted(missing - Counter({RECORD: 0}))
        self.why += f"; not written: {', '.join(words)}" if words else ""
        self.why += f"; {left} does not end by SIGKILL: left behind" if left else ""
        self._open.clear()
        self._questions.clear()
        self._unsent.clear()
