"""The agent's handles of the workers: process, link and state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from engine.core.message_kinds import ToWorker
from engine.core.messages import BusyMessage
from engine.core.ownership import Ownership
from engine.core.protocol.events import HostWord, Sight
from engine.files.atomic_write import open_to_append
from engine.runtime.ipc.clock import now_ns
from engine.runtime.ipc.link import Link, packet
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.process.fork_client import Child, ForkServer

Looks = tuple[dict[int, Sight], tuple[int, ...], dict[int, HostWord]]


@dataclass(slots=True)
class WorkerHandle:
    """One worker. `state` is one of starting, ready, waiting, running, finished, failed, left, dead."""

    worker: int
    slots: tuple[tuple[int, int], ...]
    child: Child
    link: Link
    log: Path
    state: str = "starting"
    busy: BusyMessage = field(default_factory=BusyMessage)  # before it has joined
    exit_code: int | None = None
    peak_stash: dict[tuple[int, int], int] = field(default_factory=dict)
    peak_memory_kib: int = 0
    is_left_behind: bool = False  # SIGKILL has not ended it
    host: str = ""  # the name of its host, if the run has several
    local_rank: int = 0  # the least number that no other living worker of its host has

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
        is_empty = self.log.exists() and not self.log.stat().st_size  # on another host it may not be here
        return f"{self.name}{self.doing and f', which {self.doing},'} wrote {'nothing' if is_empty else self.log}"

    def release(self) -> None:
        """Closes the descriptors of a worker, and kills it if it has not ended."""
        self.link.close()
        if self.is_left_behind:
            self.child.close(0.0)
        else:
            self.child.close()


def start_workers(
    server: ForkServer,
    ownership: Ownership,
    record_fds: Sequence[int],
    board: ProgressBoard,
    logs: Path,
    more_fds: Sequence[int] = (),
    role: str = "worker",
) -> dict[int, WorkerHandle]:
    """Forks one process for each worker of an ownership; its output goes to ``logs/worker-N.log``.

    Each gets its link, the `record_fds` (the events file and the folder of steps), the progress board, and `more_fds`.
    """
    with server.forking():
        fds = (*record_fds, board.fd, *more_fds)
        return {each: start_worker(server, each, ownership, fds, logs, role) for each in ownership.workers()}


def start_worker(
    server: ForkServer, worker: int, ownership: Ownership, fds: Sequence[int], logs: Path, role: str = "worker"
) -> WorkerHandle:
    """Forks the process of a worker, which gets its link before `fds`."""
    log, there = logs / f"worker-{worker}.log", server.at(worker)
    child, link = fork_linked(there, role, f"bamboo-{worker}", log, fds)
    return WorkerHandle(worker, ownership.slots_of(worker), child, link, log, host=there.host)


def fork_linked(server: ForkServer, role: str, name: str, log: Path, fds: Sequence[int]) -> tuple[Child, Link]:
    """Forks a process that writes to `log` and gets a link to this process before `fds`; returns it and the link."""
    log_fd = open_to_append(log)
    link, far = Link.pair(blocking=False)
    child = server.fork(role, name, log_fd, [far.fileno(), *fds])
    os.close(log_fd)
    far.close()
    return child, child.linked(link)


def free_rank(members: Iterable[WorkerHandle], host: str) -> int:
    """Returns the local rank of one more worker of a host: a worker that has ended leaves its own, and its GPU."""
    taken = {each.local_rank for each in members if each.exit_code is None and each.host == host}
    return next(rank for rank in count() if rank not in taken)


def give_slots(members: Iterable[WorkerHandle], ownership: Ownership) -> None:
    """Sets the slots of members to those that they own now."""
    for member in members:
        member.slots = ownership.slots_of(member.worker)


def sights_of(members: Iterable[WorkerHandle], board: ProgressBoard | None) -> Looks:
    """Returns the sights of workers that have not ended, those from whose hosts nothing comes, the words of hosts."""
    living = [each for each in members if each.exit_code is None]
    seen = {each.worker: _sight_of(each, board) for each in living} if board else {}
    sights = {worker: sight for worker, sight in seen.items() if sight is not None}
    told = {each.worker: each.child.word() for each in living}
    words = {worker: HostWord(*word) for worker, word in told.items() if word is not None}
    return sights, tuple(each.worker for each in living if each.child.is_unseen), words


def _sight_of(member: WorkerHandle, board: ProgressBoard) -> Sight | None:
    """Returns the findings of a look at a worker's process and at its line of the board."""
    place, times = board.place_of(member.worker), member.child.times()
    if place is None or times is None:
        return None
    at = (place.epoch, place.step, place.number, place.inside)
    inside_ns = max(0, member.child.seen_ns() - place.since_ns) if place.inside else 0
    return Sight(*at, inside_ns, place.slowest_ns, place.loading, *times)


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
