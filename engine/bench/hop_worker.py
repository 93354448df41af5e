"""A worker of the links benchmark: worker 0 sends, worker 1 receives, by links, Gloo, torch's calls, a bare socket.

A message begins with the time of its sending, on the clock that both processes have.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

from engine.bench.figures import GLOO, LINKS, SOCKET, TORCH, Hops, HopTimes, in_turns
from engine.bench.torch_side import AgentStore, join_default_group
from engine.core.messages import ByeMessage
from engine.runtime.device.device import HOST
from engine.runtime.process.clock import now_ns
from engine.runtime.process.control import Control
from engine.runtime.process.link import Link
from engine.runtime.process.prctl import sleep_exactly
from engine.runtime.transport.direct_transport import DirectBackend, DirectTransport, LinkCuts
from engine.runtime.transport.links import Links
from engine.runtime.transport.peer_link import memory_of
from engine.runtime.transport.transport import ProgramKey, ProgramPurpose, TensorSpec

_PAUSE_S = 0.002  # in which both ends fall asleep
_WARM_UP = 10


@dataclass
class _Hop:
    """One way between both workers; `tensor` is the message, with the time in its first 8 bytes."""

    worker: int
    size: int
    plane: DirectTransport
    end: socket.socket  # a bare one
    times_ns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tensor = torch.zeros(self.size // 8, dtype=torch.int64)
        self.memory = memory_of(self.tensor)
        self._times = self.memory.cast("q")
        self._key, self._answer = (  # as those of a program, which are known before it runs
            ProgramKey(ProgramPurpose.ACTIVATION, 0, stage, 0, self.size + stage) for stage in range(2)
        )

    def run(self) -> None:
        """Sends a message and waits for an answer over links, or receives one, keeps its time and answers."""
        if self.worker == 0:
            time.sleep(_PAUSE_S)
            self._times[0] = now_ns()
            self.send()
            self.plane.in_order.post(1, self._answer, (TensorSpec((1,), torch.float32, False),))
            self.plane.in_order.take(1, self._answer)
            return
        received = self.receive()
        self.times_ns.append(now_ns() - int(received[0]))
        self.plane.in_order.send(0, self._answer, (torch.zeros(1),))

    def send(self) -> None:
        self.plane.in_order.send(1, self._key, (self.tensor,))

    def receive(self) -> Tensor:
        self.plane.in_order.post(0, self._key, (TensorSpec(tuple(self.tensor.shape), torch.int64, False),))
        return self.plane.in_order.take(0, self._key)[0]


class _OverGloo(_Hop):
    def send(self) -> None:
        distributed.send(self.tensor, 1)

    def receive(self) -> Tensor:
        distributed.recv(self.tensor, 0)
        return self.tensor


class _OverTorch(_Hop):
    def _call(self, operation: Callable[..., object], other: int) -> None:
        for work in distributed.batch_isend_irecv([distributed.P2POp(operation, self.tensor, other)]):
            work.wait()

    def send(self) -> None:
        self._call(distributed.isend, 1)

    def receive(self) -> Tensor:
        self._call(distributed.irecv, 0)
        return self.tensor


class _OverSocket(_Hop):
    """The least that a hop takes: a reader that only waits, and reads into the tensor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._poll = select.epoll()
        self._poll.register(self.end, select.EPOLLIN)

    def send(self) -> None:
        self.end.sendall(self.memory)

    def receive(self) -> Tensor:
        have = 0
        while have < self.size:
            self._poll.poll()
            have += self.end.recv_into(self.memory[have:])
        return self.tensor


def main(control_fd: int, events_fd: int, steps_fd: int, board_fd: int) -> int:
    """Runs one of the two workers; returns its exit code."""
    sleep_exactly()
    torch.set_num_threads(1)
    control = Control(Link.from_fd(control_fd))
    order = control.take(Hops)
    join_default_group(AgentStore(control, 0, "torch"), order.worker, 2, HOST)
    _, (end,) = control.given_links.get()  # before links adopt it
    bare = socket.socket(fileno=end)
    plane = DirectBackend(LinkCuts(control), Links(control)).joining(0, (0, 1)).join()
    for size in order.sizes:
        ways = {LINKS: _Hop, GLOO: _OverGloo, TORCH: _OverTorch, SOCKET: _OverSocket}
        hops = {name: way(order.worker, size, plane, bare) for name, way in ways.items()}
        in_turns({name: hop.run for name, hop in hops.items()}, _WARM_UP + order.hops)
        if order.worker == 1:
            for name, hop in hops.items():
                control.send(HopTimes(name, size, tuple(hop.times_ns[_WARM_UP:])))
    control.take(ByeMessage)
    return os.EX_OK
