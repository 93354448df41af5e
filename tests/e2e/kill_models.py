"""Models with a layer that never returns, while its process sends heartbeats, or that kills its process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss
from engine.runtime.transport import transfers
from engine.runtime.transport.transfers import ReduceGroup, _mean_of_chunk
from engine.runtime.transport.transport import ProgramPurpose

_FEATURES = 32  # of the synthetic vectors


class Spinning(nn.Module):
    """A linear map that never returns from one call, counted from 0; a negative number is no call."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.linear = nn.Linear(_FEATURES, _FEATURES)
        self.left = call

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        while self.left == -1:
            pass
        return self.linear(x)


def spinning(call: int = -1) -> Model:
    """Returns three layers; the middle one never returns from that call in one process."""
    return Model(
        (
            LayerSpec("before", "Linear", partial(nn.Linear, _FEATURES, _FEATURES)),
            LayerSpec("middle", "Spinning", partial(Spinning, call)),
            LayerSpec("after", "Linear", partial(nn.Linear, _FEATURES, 1)),
        ),
        default_loss,
    )


def adding_in_reverse() -> Model:
    """Returns the same layers; in a worker process, one with several parts of a sum over pipelines adds from the last.

    A planted bug: with three pipelines or more the sum has other bits.
    """
    if Path("/proc/self/comm").read_text().startswith("bamboo-"):
        transfers._mean_of_chunk = _summed_in_reverse
    return spinning()


def _summed_in_reverse(group: ReduceGroup, mine: Mapping[int, Tensor], index: int) -> Tensor:
    if len(mine) == 1:
        return _mean_of_chunk(group, mine, index)
    last = group.ownership.grid.pipelines - 1
    parts = dict(mine)
    for other in group.others:
        for pipeline in group.pipelines(other):
            (parts[pipeline],) = group.channel.take(other, group.key(ProgramPurpose.SCATTER, pipeline, index))
    total = parts[last].clone()
    for pipeline in reversed(range(last)):
        total += parts[pipeline]
    return total / len(parts)


class Deadly(nn.Module):
    """A linear map that kills one worker in one of its calls, counted from 0, in training or validation."""

    def __init__(self, worker: int, call: int, training: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(_FEATURES, _FEATURES)
        self.worker, self.left, self.in_training = worker, call, training

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.in_training and Path("/proc/self/comm").read_text() == f"bamboo-{self.worker}\n":
            self.left -= 1
            if self.left == -1:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(x)


def deadly(layer: int = 0, worker: int = -1, call: int = 0, training: bool = True) -> Model:
    """Returns three such layers and one more; one of them kills `worker`, or none if that is negative."""
    victims = [worker if each == layer else -1 for each in range(3)]
    layers = [
        LayerSpec(f"layer{each}", "Deadly", partial(Deadly, victim, call, training))
        for each, victim in enumerate(victims)
    ]
    return Model((*layers, LayerSpec("last", "Linear", partial(nn.Linear, _FEATURES, 1))), default_loss)


class Ending(nn.Module):
    """A linear map that ends every worker in the same forward, counted from 1 over all workers by a buffer."""

    def __init__(self, how: str, forward: int) -> None:
        super().__init__()
        self.linear = nn.Linear(_FEATURES, 1)
        self.done: Tensor
        self.register_buffer("done", torch.zeros((), dtype=torch.int64))
        self.how, self.last = how, forward

    def forward(self, x: Tensor) -> Tensor:
        self.done += int(self.training)
        if int(self.done) == self.last:
            if self.how == "exit":
                os._exit(1)
            if self.how == "SystemExit":
                sys.exit(3)
            if self.how == "KeyboardInterrupt":
                raise KeyboardInterrupt
            while True:
                pass
        return self.linear(x)


def ending(how: str, forward: int = 8) -> Model:
    """Returns three layers; the last one ends its worker in that forward, and each heir in the same one."""
    return Model(
        (
            LayerSpec("before", "Linear", partial(nn.Linear, _FEATURES, _FEATURES)),
            LayerSpec("middle", "Linear", partial(nn.Linear, _FEATURES, _FEATURES)),
            LayerSpec("after", "Ending", partial(Ending, how, forward)),
        ),
        default_loss,
    )
