"""The interface of whatever starts the workers of a run, and of one that it has started: on this host or another one.

ForkServer      fork_client.py: processes of this host, children of the launcher; sets their environment
ThreadServer    thread_server.py: threads of this process
HostServers     engine/runtime/agent/host_servers.py: processes of several hosts, those of others by their agents
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from engine.core.history.process_records import NetworkRecord
from engine.core.messages import HeartbeatMessage
from engine.core.protocol.events import Sight
from engine.files.atomic_write import open_to_append
from engine.runtime.process import descendants
from engine.runtime.process.link import Link, WorkerLink
from engine.runtime.process.progress_board import Progress, ProgressBoard


class WorkerProcess(Protocol):
    """The process of a worker; `lost` is why it is lost with its whole host: then nothing has seen its end."""

    pid: int
    lost: str

    @property
    def is_unseen(self) -> bool:
        """Whether it is on another host, from which no sign of life has come for a while."""

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if the process has not ended."""

    def state(self) -> str | None:
        """Returns the state of its main thread as a letter, None if it has ended."""

    def progress(self, worker: int, board: ProgressBoard) -> Progress:
        """Returns where it is; `board` is that of this host."""

    def sight(self, worker: int, board: ProgressBoard) -> Sight | None:
        """Returns the findings of a look at it, None if there are none."""

    def word(self) -> tuple[int, HeartbeatMessage | None] | None:
        """Returns how long ago it spoke, and a new heartbeat, as the agent of another host tells; None on this one."""

    def wait(self, timeout_s: float = 0.0) -> int | None:
        """Returns the exit code, negative for a signal; None if the process does not end within `timeout_s`."""

    def close(self, patience_s: float = ...) -> None:
        """Kills the process if it has not ended, and releases what this process has of it."""


Started = tuple[WorkerProcess, WorkerLink]
WorkerNews = tuple[WorkerProcess, bytes | int]  # a message of a worker, or its exit code
_MOST_WAITING = 4096  # messages of the workers of a host: a host that sends more has to wait


class HostMailbox:
    """The news of the workers of another host, from the thread of its stream to the event loop."""

    def __init__(self) -> None:
        self._news: list[WorkerNews] = []
        self._changed = threading.Condition()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        weakref.finalize(self, os.close, self._event_fd)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there is news."""
        return self._event_fd

    def put(self, process: WorkerProcess, news: bytes | int) -> None:
        """Adds a message of a worker, which waits for room, or its exit code."""
        with self._changed:
            if isinstance(news, bytes):
                self._changed.wait_for(lambda: len(self._news) < _MOST_WAITING or self._is_closed)
            self._news.append((process, news))
        os.eventfd_write(self._event_fd, 1)

    def take(self) -> list[WorkerNews]:
        """Returns the news, in order."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        with self._changed:
            news, self._news = self._news, []
            self._changed.notify_all()
        return news

    def close(self) -> None:
        """Lets no news wait any more: none is read."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


Self = TypeVar("Self", bound="Spawner")


class Spawner(Protocol):
    """Starts the workers of a run, as a context; where no other class says more, on one host."""

    host: str = ""  # the name of its host, if a run has several
    round_trip_ns: int = 0  # the worst one to other hosts lately, as their records tell it
    later_ns: int = 0  # how much later the end of a worker may be seen than on this host
    address: str = "127.0.0.1"  # where the transfers of its workers listen
    network: Mapping[str, str] | None = None  # of a run on several hosts: what their links are secured with
    news: Sequence[HostMailbox] = ()  # of other hosts

    @property
    def pid(self) -> int:
        """The pid of the process that forks workers here."""

    def start_worker(
        self, worker: int, log: Path, fds: Sequence[int], board: ProgressBoard, role: str = "worker"
    ) -> Started:
        """Starts the process of a worker, which writes to `log` and gets its link before `fds`."""
        return self.at(worker).start_worker(worker, log, fds, board, role)

    def at(self, worker: int) -> Spawner:
        """Returns the one on the host of a worker."""
        return self

    def deal(self, workers: Sequence[int]) -> None:
        """Deals workers that are started again to the hosts that are left."""
        return

    def hear(self, record: object, line: str) -> None:
        """Hears of a record of the launcher; other hosts of a run keep its decisions."""
        return

    def records_in(self, run: Path) -> None:
        """Knows the folder of the run, to which other hosts ship their records."""
        return

    def leave(self) -> None:
        """Lets the workers of other hosts go on without this one."""
        return

    def network_records(self) -> Sequence[NetworkRecord]:
        """Returns the records of round trips to other hosts that have changed."""
        return ()

    def has_ended(self) -> bool:
        """Returns whether the process that forks workers has ended; the next start then begins another."""
        return False

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """Starts inside the block may share what is gone behind it."""
        yield

    @contextlib.contextmanager
    def adopting(
        self, preload: tuple[str, ...] = (), while_waiting: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Ends all descendants of the workers behind the block; inside the block `end_descendants` can do it.

        From now on workers have imported the modules `preload` before they begin. `while_waiting` is called each second
        in which no answer comes.
        """
        yield

    def end_descendants(self, patience_s: float = descendants.PATIENCE_S) -> None:
        """Ends the processes that were left behind by workers that are closed; waits `patience_s` for their ends."""
        return

    def close(self) -> None:
        """Ends all that it has started."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Process = TypeVar("Process", bound=WorkerProcess)


def start_linked(
    fork: Callable[[str, str, int, Sequence[int]], Process], role: str, worker: int, log: Path, fds: Sequence[int]
) -> tuple[Process, Link]:
    """Forks a worker of this host, which gets a link to this process before `fds`; returns it and the link."""
    log_fd = open_to_append(log)
    link, far = Link.pair(blocking=False)
    try:
        return fork(role, f"bamboo-{worker}", log_fd, [far.fileno(), *fds]), link
    finally:
        os.close(log_fd)
        far.close()
