"""The workers of a run as the agent sees them: process, link, state and what they said of themselves at the end."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.ownership import Ownership
from engine.runtime.children import Child, ForkServer
from engine.runtime.link import LOOPBACK, Link
from engine.runtime.progress_board import ProgressBoard


@dataclass(slots=True)
class Member:
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
    is_released: bool = False

    def release(self) -> None:
        """Gives back what this process holds of a worker that has ended."""
        if not self.is_released:
            self.is_released = True
            self.link.close()
            os.close(self.child.pidfd)


def start_members(
    server: ForkServer,
    ownership: Ownership,
    events_fd: int,
    board: ProgressBoard,
    logs: Path,
    role: str = "worker",
) -> dict[int, Member]:
    """Forks one process for each worker of an ownership; its output goes to ``logs/worker-N.log``."""
    members = {}
    for worker in ownership.workers():
        near, far = Link.pair(blocking=False)
        log = logs / f"worker-{worker}.log"
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        child = server.fork(role, f"bamboo-{worker}", log_fd, [far.fileno(), events_fd, board.fd])
        os.close(log_fd)
        far.close()
        members[worker] = Member(worker, ownership.slots_of(worker), child, near, log)
    return members


class RendezvousStore:
    """The run's store: a process that serves on a loopback port bound here."""

    def __init__(self, server: ForkServer, logs: Path):
        self.link, far = Link.pair()
        log_fd = os.open(logs / "store.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with socket.create_server((LOOPBACK, 0), backlog=1024) as listener:
            self.port = listener.getsockname()[1]
            self.child = server.fork("store", "bamboo-store", log_fd, [listener.fileno(), far.fileno()])
        os.close(log_fd)
        far.close()

    def close(self) -> None:
        """Lets the store end."""
        self.link.close()
        os.close(self.child.pidfd)


def close_members(members: Sequence[Member]) -> None:
    """Releases what this process still holds of workers."""
    for member in members:
        member.release()
