"""A process of a worker on this host, as its agent keeps it for the host that coordinates, and for the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.hosts.host_messages import SignsHostMessage, WorkerSign, frame
from engine.core.message_codec import encode
from engine.core.process_messages import PingMessage
from engine.runtime.hosts.said_again import SaidAgain
from engine.runtime.hosts.stream_end import StreamEnd
from engine.runtime.ipc.link import Link
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import now_ns
from engine.runtime.process.fork_client import Child

_TOGETHER = 32  # signs in one message
_PING = encode(PingMessage())


@dataclass(slots=True)
class OwnProcess:
    """The process of a worker; `code` is there when it has ended."""

    number: int
    worker: int
    child: Child
    link: Link
    heartbeat: bytes = b""  # the last one that no sign has told
    code: int | None = None
    said: SaidAgain = field(default_factory=SaidAgain)

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
        at, place, times = board.read(self.worker), board.place_of(self.worker), self.child.times()
        where: tuple[Any, ...] = ()
        if place is not None:
            aged = place._replace(since_ns=now_ns() - place.since_ns)
            where = tuple(map(int, aged))
        progress = (at.step, at.num_computed, at.action)
        return WorkerSign(self.number, heartbeat, progress, where, () if times is None else tuple(times))


def tell_signs(living: Sequence[OwnProcess], board: ProgressBoard, end: StreamEnd) -> None:
    """Sends the signs of life of processes in one message, and asks for the next ones."""
    signs = [each.sign(board) for each in living]
    for begin in range(0, max(1, len(signs)), _TOGETHER):
        part = tuple(map(tuple, signs[begin : begin + _TOGETHER]))
        end.send(frame(SignsHostMessage(end.received, now_ns(), part)))  # type: ignore[arg-type]
    for each in living:
        with contextlib.suppress(OSError):  # it was released meanwhile
            each.link.send_packet(_PING)
