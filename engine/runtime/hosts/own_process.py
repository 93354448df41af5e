"""A process of a worker on this host, as its agent keeps it for the host that coordinates, and for the next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.core.errors import ExitCode
from engine.core.hosts.host_messages import WorkerSign
from engine.core.message_codec import kind_of
from engine.core.process_messages import StopMessage
from engine.runtime.hosts.said_again import SaidAgain
from engine.runtime.ipc.link import Link
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import now_ns
from engine.runtime.process.fork_client import Child

_STOP = f'{{"kind":"{kind_of(StopMessage)}"'.encode()


@dataclass(slots=True)
class OwnProcess:
    """The process of a worker; `code` is there when it has ended."""

    number: int
    worker: int
    child: Child
    link: Link
    heartbeat: bytes = b""  # the last one that no sign has told
    code: int | None = None
    heard_ns: int = field(default_factory=now_ns)  # when it spoke last
    num_signals: int = 0  # from the host that coordinates now
    said: SaidAgain = field(default_factory=SaidAgain)
    was_stopped: bool = False

    def tell(self, packet: bytes) -> None:
        """Passes on a message of the host that coordinates."""
        self.was_stopped = self.was_stopped or packet.startswith(_STOP)
        self.link.send_packet(packet)

    @property
    def has_left(self) -> bool:
        """Whether it has ended, and the run goes on without it: the run was not over, and did not stop it."""
        return self.has_ended and self.code != ExitCode.OK and not self.was_stopped

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or this agent has no handle of it any more."""
        return self.code is not None or self.child.is_closed

    def to_plain(self) -> tuple[int, ...]:
        """Returns the facts of it that the next host needs."""
        return (self.number, self.worker, self.child.pid, *(() if self.code is None else (self.code,)))

    def sign(self, board: ProgressBoard) -> WorkerSign:
        """Returns its sign of life, and takes its heartbeat for that."""
        heartbeat, self.heartbeat = self.heartbeat.decode(), b""
        num_signals = self.num_signals  # before the look at the process, which they may have changed
        at, place, times = board.read(self.worker), board.place_of(self.worker), self.child.times()
        where: tuple[Any, ...] = ()
        if place is not None:
            aged = place._replace(since_ns=now_ns() - place.since_ns)
            where = tuple(map(int, aged))
        progress = (at.step, at.num_computed, at.action)
        seen: tuple[Any, ...] = () if times is None else tuple(times)
        return WorkerSign(self.number, heartbeat, progress, where, seen, num_signals, now_ns() - self.heard_ns)
