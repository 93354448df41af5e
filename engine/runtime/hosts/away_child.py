"""The process of a worker on another host, as this host sees it: it looks like one of this host.

    event loop --- `AwayLink` ------------------> stream ---> the agent of the other host --- link --- worker
    event loop <-- its socket, with a far end <-- stream <--- that agent
    event loop <-- `pidfd`, an event that the word of the other host about the end sets

Rules: the last words of a worker come before its end. If its host is lost, `lost` says so, and nothing saw the end. A
state that was read before the last signal proves nothing about it: it counts as unknown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence

from engine.core.errors import ensure
from engine.core.hosts.host_messages import SignalHostMessage, WordsHostMessage, WorkerSign, frame
from engine.core.membership.evidence import Loading
from engine.core.message_codec import encode
from engine.core.process_messages import PingMessage
from engine.runtime.ipc.link import Link
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import now_ns
from engine.runtime.process.fork_client import Child
from engine.runtime.process.process_state import ProcessTimes

_PING = encode(PingMessage())  # the agent of its host asks for signs of life
_UNSEEN_NS = 600_000_000  # without two signs
CLOSED = 0  # in the place of the number of a signal
UNKNOWN = "?"  # the state of a process that its host has not looked at since the last signal
Send = Callable[[bytes], None]


class AwayLink(Link):
    """The near end of the link of a process on another host: each message goes to the stream at once."""

    takes_fds = False

    def __init__(self, near: Link, number: int, send: Send):
        super().__init__(near.socket, blocking=False)
        self._header, self._send = WordsHostMessage(number), send

    def send_packet(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Sends one message, without descriptors; the agent of the other host asks for signs of life by itself."""
        ensure(not fds, "no descriptor travels to another host")
        if data != _PING:
            self._send(frame(self._header, data))
        return True


class AwayChild(Child):
    """A worker of another host; `far` is a descriptor of the far end of its link, `board_fd` of this host's board."""

    def __init__(self, name: str, number: int, worker: int, far: int, board_fd: int, send: Send):
        self._ended_fd = os.eventfd(0)
        super().__init__(name, 0, os.dup(self._ended_fd))
        self.worker, self.number = worker, number
        self._far = Link.from_fd(os.dup(far))
        self._far.socket.setblocking(True)
        self._board = ProgressBoard(os.dup(board_fd), worker + 1)
        self._send = send
        self._times: ProcessTimes | None = None
        self._seen_ns = now_ns()
        self._num_signals = self._num_seen = self._age_ns = 0
        self._heartbeat = ""
        self._has_ended = threading.Event()
        self._ending = threading.Lock()

    def linked(self, link: Link) -> Link:
        """Returns the link of the process, whose words go to the stream."""
        return AwayLink(link, self.number, self._send)

    def hear(self, packet: bytes) -> None:
        """Takes a message of the worker."""
        with contextlib.suppress(OSError):  # its handle is closed
            self._far.send_packet(packet)

    def sees(self, sign: WorkerSign) -> None:
        """Takes a sign of life: the last heartbeat, the line of the board, the times of the process."""
        with self._ending:
            if self.is_closed or self._has_ended.is_set():
                return
            self._seen_ns = at_ns = now_ns()
            self._age_ns = sign.age_ns
            self._heartbeat = sign.heartbeat or self._heartbeat
            self._board.write(self.worker, *sign.progress)
            if sign.place:
                epoch, step, number, inside, age_ns, slowest_ns, loading = sign.place
                self._board.place(self.worker, (epoch, step, number, bool(inside), at_ns - age_ns, slowest_ns))
                for each in Loading:
                    self._board.load(self.worker, each, each is not Loading.NONE and each == loading)
            if sign.times:
                state, thread_ns, process_ns = sign.times
                self._times = ProcessTimes(str(state), int(thread_ns), int(process_ns))
                self._num_seen = sign.num_signals

    def ended(self, code: int, lost: str = "") -> None:
        """Takes the end of the process."""
        with self._ending:
            if not self._has_ended.is_set():
                self._code, self.lost = code, lost
                self._has_ended.set()
                os.eventfd_write(self._ended_fd, 1)
                with contextlib.suppress(OSError):
                    self._far.socket.shutdown(socket.SHUT_WR)  # no more words come

    @property
    def is_unseen(self) -> bool:  # type: ignore[override]
        """Whether no sign of life of it has come for a while."""
        return now_ns() - self._seen_ns > _UNSEEN_NS

    def seen_ns(self) -> int:
        """Returns the time of its last sign of life."""
        return self._seen_ns

    def word(self) -> tuple[int, str] | None:
        """Returns how long ago it spoke, by its last sign of life, and takes its heartbeat."""
        with self._ending:
            heartbeat, self._heartbeat = self._heartbeat, ""
            return self._age_ns, heartbeat

    def state(self) -> str | None:
        """Returns its state as its host saw it last, `UNKNOWN` before a look; None if it has ended."""
        with self._ending:
            if self._has_ended.is_set():
                return None
            return UNKNOWN if self._times is None or self._num_seen != self._num_signals else self._times.state

    def times(self) -> ProcessTimes | None:
        """Returns its times as its host saw them last."""
        return None if self._has_ended.is_set() else self._times

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if the process has not ended."""
        if not self._has_ended.is_set():
            self._num_signals += 1
            self._send(frame(SignalHostMessage(self.number, int(number))))

    def wait(self, timeout_s: float = 0.0) -> int | None:
        """Returns the exit code, negative for a signal; None if no end is known within `timeout_s`."""
        return self._code if self._has_ended.wait(timeout_s) else None

    def close(self, patience_s: float = 2.0) -> None:
        """Kills the process if it has not ended, and releases all that this host has of it."""
        if self.is_closed:
            return
        self.signal(signal.SIGKILL)
        self.wait(patience_s)
        self._send(frame(SignalHostMessage(self.number, CLOSED)))
        with self._ending:
            self.is_closed = True
            self._has_ended.set()
            with contextlib.suppress(OSError):
                self._far.socket.shutdown(socket.SHUT_RDWR)
            self._far.close()
            self._board.close()
            os.close(self._ended_fd)
            os.close(self.pidfd)
