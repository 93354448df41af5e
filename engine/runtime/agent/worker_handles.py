"""The agent's handles of the workers and of the rendezvous store: process, link and state."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.errors import InvariantError
from engine.core.message_codec import ToWorker
from engine.core.ownership import Ownership
from engine.core.process_messages import PingMessage
from engine.files.atomic_write import open_to_append
from engine.runtime.ipc.link import LOOPBACK, Link, packet
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.process.fork_client import Child, ForkServer

_MAX_MUTE = 3
_MAX_UNANSWERED = (
    12  # ticks without an answer; a count of ticks, not a time, because the agent itself may have been stopped
)


@dataclass(slots=True)
class WorkerHandle:
    """One worker. `state` is one of starting, ready, running, finished, failed, left, dead."""

    worker: int
    slots: tuple[tuple[int, int], ...]
    child: Child
    link: Link
    log: Path
    state: str = "starting"
    exit_code: int | None = None
    peak_stash: dict[tuple[int, int], int] = field(default_factory=dict)
    peak_memory_kib: int = 0
    is_left_behind: bool = False  # SIGKILL has not ended it

    def release(self) -> None:
        """Closes the descriptors of a worker, and kills it if it has not ended."""
        self.link.close()
        self.child.close()


def start_workers(
    server: ForkServer,
    ownership: Ownership,
    events_fd: int,
    board: ProgressBoard,
    logs: Path,
    role: str = "worker",
) -> dict[int, WorkerHandle]:
    """Forks one process for each worker of an ownership; its output goes to ``logs/worker-N.log``."""
    members = {}
    with server.forking():
        for worker in ownership.workers():
            log = logs / f"worker-{worker}.log"
            child, link = _fork(server, role, f"bamboo-{worker}", log, [events_fd, board.fd])
            members[worker] = WorkerHandle(worker, ownership.slots_of(worker), child, link, log)
    return members


def _fork(server: ForkServer, role: str, name: str, log: Path, fds: Sequence[int]) -> tuple[Child, Link]:
    """Forks a process that writes to `log` and gets a link to this process before `fds`; returns it and the link."""
    log_fd = open_to_append(log)
    link, far = Link.pair(blocking=False)
    child = server.fork(role, name, log_fd, [far.fileno(), *fds])
    os.close(log_fd)
    far.close()
    return child, link


class RendezvousStore:
    """The rendezvous store of a run: a process on a loopback port. Groups need it only while they are formed."""

    def __init__(self, server: ForkServer, logs: Path):
        self._server = server
        self.log = logs / "store.log"
        self._num_mute = 0  # stores in a row that ended before they served
        self._start()

    def _start(self) -> None:
        with socket.create_server((LOOPBACK, 0), backlog=1024) as listener:
            self.child, self.link = _fork(self._server, "store", "bamboo-store", self.log, [listener.fileno()])
            self.port = listener.getsockname()[1]
        self._has_served, self._num_unanswered = False, 0

    def look(self) -> bool:
        """Pings the store; kills it if it has not answered for many ticks, and returns whether it was killed.

        A stopped process would block the workers that wait for it; its end ends their wait.
        """
        self._hear()
        self._num_unanswered += self.link.send(PingMessage())
        if self._num_unanswered <= _MAX_UNANSWERED:
            return False
        self.child.signal(signal.SIGKILL)
        self._num_unanswered = 0
        return True

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.link.receive() is not None:
                self._has_served, self._num_unanswered = True, 0

    def start_again(self) -> None:
        """Replaces a store that has ended by another one on another port.

        Raises InvariantError if three stores in a row end before they serve, EnvironmentLacksError if no process can
        be started.
        """
        self._hear()
        self._num_mute = 0 if self._has_served else self._num_mute + 1
        if self._num_mute == _MAX_MUTE:
            raise InvariantError(
                f"{_MAX_MUTE} rendezvous stores ended before they served; the last one wrote {self.log}"
            )
        self.close()
        self._start()

    def close(self) -> None:
        """Ends the store."""
        self.link.close()
        self.child.close()


def tell_all(members: Iterable[WorkerHandle], message: ToWorker) -> None:
    """Sends a message to every worker that has not ended."""
    data = packet(message)
    for member in members:
        if member.exit_code is None:
            member.link.send_packet(data)


def close_workers(members: Sequence[WorkerHandle]) -> None:
    """Releases every worker."""
    for member in members:
        member.release()
