"""Layers whose forwards take time in a kernel, so that to make their graphs takes none."""

from __future__ import annotations

import time
from functools import partial

import torch
import torch._dynamo  # else each worker imports it when it makes the first graph, which takes seconds
from torch import Tensor, nn

from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss

_WIDTH = 32  # features of the synthetic vectors
_OPS = torch.library.Library("bamboo_tests", "FRAGMENT")
_OPS.define("slept(Tensor x, float seconds) -> Tensor")


def _slept(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x.clone()


_OPS.impl("slept", _slept, "CPU")
_OPS.impl("slept", lambda x, seconds: torch.empty_like(x), "Meta")


class SleepingKernel(nn.Linear):
    def __init__(self, seconds: float) -> None:
        super().__init__(_WIDTH, _WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            given = torch.ops.bamboo_tests.slept(x.detach(), self.seconds)
        return torch.tanh(super().forward(x)) * given


def sleeping_kernels(seconds: float = 0.0) -> Model:
    """Returns three such layers."""
    specs = (LayerSpec(f"sleeping{index}", "SleepingKernel", partial(SleepingKernel, seconds)) for index in range(3))
    return Model(tuple(specs), default_loss, check_pure=False)  # a trial would sleep too
