"""`timed` stands for an accelerator where there is none: its layers sleep as long as a device would compute.

The rest is real: activations of [microbatch size, width] floats, parameters, gradients and updates, all small.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.data import DataFacts
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss


def timed(
    facts: DataFacts, *, layers: int = 4, forward_ms: float = 10.0, backward_ms: float = 20.0, width: int = 256
) -> Model:
    """Makes `layers` layers that sleep; inputs are repeated or cut to `width`, so its size costs no compute."""
    specs = (
        LayerSpec(f"timed{index}", "Timed", partial(Timed, width, forward_ms / 1e3, backward_ms / 1e3))
        for index in range(layers)
    )
    return Model(tuple(specs), default_loss)


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
        # The sleep comes after the scale: its backward runs even where the input needs no gradient.
        return _Sleep.apply(x * self.scale, self.forward_s, self.backward_s)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None
