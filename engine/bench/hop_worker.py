"""A worker of the links benchmark: worker 0 sends, worker 1 receives, over links, Gloo and torch's own calls in turn.

A message begins with the time of its sending, on the clock that both processes have.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

from engine.bench.figures import GLOO, LINKS, TORCH, Hops, HopTimes, in_turns
from engine.bench.torch_side import AgentStore, join_default_group
from engine.core.messages import ByeMessage
from engine.runtime.device.device import HOST
from engine.runtime.ipc.clock import now_ns
from engine.runtime.ipc.control import Control
from engine.runtime.ipc.link import Link
from engine.runtime.process.prctl import sleep_exactly
from engine.runtime.transport.direct_transport import DirectBackend, DirectTransport, LinkCuts
from engine.runtime.transport.links import Links
from engine.runtime.transport.peer_link import memory_of
from engine.runtime.transport.transport import ProgramKey, ProgramPurpose, TensorSpec

_PAUSE_S = 0.002  # in which both ends fall asleep
_WARM_UP = 10


@dataclass
class _Hop:
    """One way between both workers; `tensor` is what is sent, with the time in its first 8 bytes."""

    worker: int
    size: int
    plane: DirectTransport
    taken: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tensor = torch.zeros(self.size // 8, dtype=torch.int64)
        self._times = memory_of(self.tensor).cast("q")
        self._number = 0

    def run(self) -> None:
        """Sends one message, or receives one and keeps its time."""
        if self.worker == 0:
            time.sleep(_PAUSE_S)
            self._times[0] = now_ns()
            self.send()
            self.answered()
            return
        received = self.receive()
        self.taken.append(now_ns() - int(received[0]))
        self.answer()

    def _key(self, stage: int) -> ProgramKey:
        return ProgramKey(ProgramPurpose.ACTIVATION, 0, stage, 0, self.size + stage)

    def answer(self) -> None:
        """Tells worker 0 that the hop is over, over links in every way."""
        self.plane.in_order.send(0, self._key(1), (torch.zeros(1),))

    def answered(self) -> None:
        """Waits for the answer."""
        key = self._key(1)
        self.plane.in_order.post(1, key, (TensorSpec((1,), torch.float32, False),))
        self.plane.in_order.take(1, key)

    def send(self) -> None:
        """Sends the tensor."""
        self.plane.in_order.send(1, self._key(0), (self.tensor,))

    def receive(self) -> Tensor:
        """Waits for the tensor."""
        key = self._key(0)
        self.plane.in_order.post(0, key, (TensorSpec(tuple(self.tensor.shape), torch.int64, False),))
        return self.plane.in_order.take(0, key)[0]


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


def main(control_fd: int, events_fd: int, steps_fd: int, board_fd: int) -> int:
    """Runs one of the two workers; returns its exit code."""
    sleep_exactly()
    torch.set_num_threads(1)
    control = Control(Link.from_fd(control_fd))
    told = control.take(Hops)
    join_default_group(AgentStore(control, 0, "torch"), told.worker, 2, HOST)
    plane = DirectBackend(LinkCuts(control), Links(control)).joining(0, (0, 1)).join()
    for size in told.sizes:
        ways = {LINKS: _Hop, GLOO: _OverGloo, TORCH: _OverTorch}
        made = {name: way(told.worker, size, plane) for name, way in ways.items()}
        in_turns({name: each.run for name, each in made.items()}, _WARM_UP + told.hops)
        if told.worker == 1:
            for name, each in made.items():
                control.send(HopTimes(name, size, tuple(each.taken[_WARM_UP:])))
    control.take(ByeMessage)
    return os.EX_OK
