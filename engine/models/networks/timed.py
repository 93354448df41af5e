"""`timed` simulates an accelerator: its layers sleep for the time that a device would compute.

Activations of [microbatch size, width] floats, parameters, gradients and updates are real, but small. The module keeps
the measured times of the layers, because an ideal step time must be computed from these.

Half of a backward is for the input and half for the weights. Each is a node of its own in the graph, so that a split
backward runs one half. In a first layer, whose input needs no gradient, all of it is for the weights.
"""

from __future__ import annotations

import math
import time
from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.data import DataFacts
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss

# Durations in ns of the newest forwards, and of parts of backwards, of this process's timed layers.
forwards_ns: deque[int] = deque(maxlen=1024)
backwards_ns: deque[int] = deque(maxlen=1024)


def timed(
    facts: DataFacts, *, layers: int = 4, forward_ms: float = 10.0, backward_ms: float = 20.0, width: int = 256
) -> Model:
    """Returns a model of `layers` sleeping layers; the input is repeated or cut to `width`, without computation."""
    specs = (
        LayerSpec(f"timed{index}", "Timed", partial(Timed, width, forward_ms / 1e3, backward_ms / 1e3))
        for index in range(layers)
    )
    return Model(tuple(specs), default_loss, check_pure=False)  # they are pure, and a trial would sleep too


class Timed(nn.Module):
    """Scales each of `width` features and sleeps."""

    def __init__(self, width: int, forward_s: float, backward_s: float):
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.scale = nn.Parameter(torch.empty(width).uniform_(0.9, 1.1))

    def forward(self, x: Tensor) -> Tensor:
        """Returns float32 [size, width]."""
        width, num_features = len(self.scale), x.shape[1]
        if num_features != width:
            x = x.repeat(1, math.ceil(width / num_features))[:, :width]
        start_ns = time.monotonic_ns()
        for_input_s = self.backward_s / 2 if x.requires_grad else 0.0
        y = _SleepBackward.apply(x, for_input_s) * _SleepBackward.apply(self.scale, self.backward_s - for_input_s)
        time.sleep(self.forward_s)
        forwards_ns.append(time.monotonic_ns() - start_ns)
        return y


class _SleepBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        start_ns = time.monotonic_ns()
        time.sleep(ctx.backward_s)
        backwards_ns.append(time.monotonic_ns() - start_ns)
        return gradients[0], None
