"""The agent's handles of the workers: process, link and state; and the loop in which a host waits for its workers."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

from engine.codec.messages import decode
from engine.core.errors import required
from engine.core.message_kinds import Message, ToWorker
from engine.core.messages import BusyMessage
from engine.core.ownership import Ownership
from engine.core.protocol.events import HostWord, Sight
from engine.runtime.process.clock import now_ns
from engine.runtime.process.fork_client import Child
from engine.runtime.process.link import Link, WorkerLink, packet
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.spawner import Spawner, WorkerProcess

_Word = TypeVar("_Word")
Looks = tuple[dict[int, Sight], tuple[int, ...], dict[int, HostWord]]


@dataclass(slots=True)
class WorkerHandle:
    """One worker. `state` is one of starting, ready, waiting, running, finished, failed, left, dead."""

    worker: int
    slots: tuple[tuple[int, int], ...]
    child: WorkerProcess
    link: WorkerLink
    log: Path
    state: str = "starting"
    busy: BusyMessage = field(default_factory=BusyMessage)  # before it has joined
    exit_code: int | None = None
    peak_stash: dict[tuple[int, int], int] = field(default_factory=dict)
    peak_memory_kib: int = 0
    is_left_behind: bool = False  # SIGKILL has not ended it
    host: str = ""  # the name of its host, if the run has several
    local_rank: int = 0  # the least number that no other living worker of its host has

    def begin(self, state: str, busy: BusyMessage = BusyMessage()) -> None:  # noqa: B008 - it does not change
        """Notes a state, and a long part of the start."""
        self.state, self.busy = state, busy

    @property
    def is_there(self) -> bool:
        """Whether it has not ended, and is not left behind."""
        return self.exit_code is None and not self.is_left_behind

    @property
    def name(self) -> str:
        """Its number and its process, in words."""
        return f"worker {self.worker} (pid {self.child.pid})"

    @property
    def doing(self) -> str:
        """The part of the start that it has been in for seconds, in words; empty if there is none."""
        part, line, since_ns = self.busy.part, self.busy.line, self.busy.since_ns
        return part and f"{part} for {(now_ns() - since_ns) / 1e9:.0f} s" + (f" ({line})" if line else "")

    @property
    def account(self) -> str:
        """The log of a worker that is out, and the part of the start that it was in, in words."""
        there = [each for each in (self.log, self.log.with_suffix(".out")) if each.exists()]  # of this host
        is_empty = there and not any(each.stat().st_size for each in there)
        return f"{self.name}{self.doing and f', which {self.doing},'} wrote {'nothing' if is_empty else self.log}"

    def release(self) -> None:
        """Closes the descriptors of a worker, and kills it if it has not ended."""
        self.link.close()
        if self.is_left_behind:
            self.child.close(0.0)
        else:
            self.child.close()


def start_workers(
    server: Spawner, ownership: Ownership, record_fds: Sequence[int], board: ProgressBoard, logs: Path, role: str
) -> dict[int, WorkerHandle]:
    """Forks a process per worker, with ``logs/worker-N.log``, its link, the `record_fds` and the progress board."""
    with server.forking():
        fds = (*record_fds, board.fd)
        return {
            worker: start_worker(server, worker, ownership, fds, board, logs, role) for worker in ownership.workers()
        }


def start_worker(
    server: Spawner,
    worker: int,
    ownership: Ownership,
    fds: Sequence[int],
    board: ProgressBoard,
    logs: Path,
    role: str = "worker",
) -> WorkerHandle:
    """Starts the process of a worker, which gets its link before `fds`."""
    log, there = logs / f"worker-{worker}.log", server.at(worker)
    child, link = there.start_worker(worker, log, fds, board, role)
    return WorkerHandle(worker, ownership.slots_of(worker), child, link, log, host=there.host)


def free_rank(members: Iterable[WorkerHandle], host: str) -> int:
    """Returns the local rank of one more worker of a host: a worker that has ended leaves its own, and its GPU."""
    ranks = {each.local_rank for each in members if each.exit_code is None and each.host == host}
    return next(rank for rank in count() if rank not in ranks)


def give_slots(members: Iterable[WorkerHandle], ownership: Ownership) -> None:
    """Sets the slots of members to those that they own now."""
    for member in members:
        member.slots = ownership.slots_of(member.worker)


def sights_of(members: Iterable[WorkerHandle], board: ProgressBoard | None, judged: Collection[int]) -> Looks:
    """Returns the sights of `judged` living workers, those whose hosts are silent, and the words of hosts."""
    living = [each for each in members if each.exit_code is None]
    looked_at = {*judged}
    seen = {each.worker: each.child.sight(each.worker, board) for each in living if each.worker in looked_at and board}
    sights = {worker: sight for worker, sight in seen.items() if sight is not None}
    by_worker = {each.worker: each.child.word() for each in living}
    words = {worker: HostWord(*word) for worker, word in by_worker.items() if word is not None}
    return sights, tuple(each.worker for each in living if each.child.is_unseen), words


def tell_all(members: Iterable[WorkerHandle], message: ToWorker) -> None:
    """Sends a message to every worker that has not ended."""
    data = packet(message)
    for member in members:
        if member.exit_code is None:
            member.link.send_packet(data)


def close_workers(members: Mapping[int, WorkerHandle]) -> None:
    """Releases every worker, also those that were added since."""
    for member in members.values():
        member.release()


# The workers of one host, as its agent waits for them: the one loop of the host that coordinates and of each other.
#
# Rules: the last words of a worker come before its end. A process that the worker has started may hold the link open;
# the link is then empty, but not at its end. The descendants of a worker end with it.

_PATIENCE_S = 0.05  # for the descendants of a worker: large ones end slowly, and the others wait for this loop


class Source(Protocol):
    """Something with a descriptor that becomes readable."""

    def fileno(self) -> int:
        """Returns the descriptor."""


class LocalWorkers:
    """The processes of this host that are watched, and other sources of events."""

    def __init__(self, spawner: Spawner):
        self._spawner, self._selector = spawner, selectors.DefaultSelector()

    def close(self) -> None:
        """Watches nothing any more."""
        self._selector.close()

    def add(self, source: Source | int, handle: Callable[[], object]) -> None:
        """Calls `handle` when a source is readable."""
        self._selector.register(source, selectors.EVENT_READ, handle)

    def remove(self, source: Source | int) -> None:
        """Watches a source no longer, if it was watched."""
        if source in self._selector.get_map():
            self._selector.unregister(source)

    def watch(
        self,
        child: Child,
        link: Link,
        *,
        read: Callable[[bytes], _Word],
        hear: Callable[[_Word], object],
        end: Callable[[int], object],
        see_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Tells of the messages of a worker, as `read` returns them, of the sight of its end, and of its end."""

        def spoken() -> bool:
            packet = link.receive_packet()
            if packet:
                hear(read(packet))
            else:
                self.remove(link)
            return bool(packet)

        def ended() -> None:
            see_end()
            with contextlib.suppress(BlockingIOError):
                while spoken():
                    pass
            self.forget(child, link)
            end(required(child.wait(), "a process whose pidfd is readable has ended"))
            self._spawner.end_descendants(_PATIENCE_S)

        self.add(child.pidfd, ended)
        self.add(link, spoken)

    def watch_member(
        self,
        member: WorkerHandle,
        hear: Callable[[WorkerHandle, Message], object],
        end: Callable[[WorkerHandle, int], object],
        see_end: Callable[[WorkerHandle], object] = lambda member: None,
    ) -> None:
        """Tells of a member of a run as `watch` does, if it is a worker of this host."""
        if isinstance(member.child, Child) and isinstance(member.link, Link):
            self.watch(
                member.child,
                member.link,
                read=decode,
                hear=partial(hear, member),
                end=partial(end, member),
                see_end=partial(see_end, member),
            )

    def forget(self, child: Child, link: Link) -> None:
        """Watches a worker no longer."""
        self.remove(link)
        self.remove(child.pidfd)

    def wait(self, timeout_s: float) -> None:
        """Waits for events, and handles them."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            # An earlier handler of this round may have unregistered this source, or have emptied it.
            if self._selector.get_map().get(key.fd) is key:
                with contextlib.suppress(BlockingIOError):
                    key.data()
