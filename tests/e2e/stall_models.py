"""A model of sleeping layers that obey orders from outside: a file in a folder, named after the process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss
from engine.models.networks import Timed

_WIDTH = 32  # features of the synthetic vectors
_FORWARD_S, _BACKWARD_S = 0.002, 0.004


class Obeying(nn.Module):
    """A sleeping layer that obeys an order, which is the text of a file named after its process."""

    def __init__(self, orders: str, obey: Callable[[str], None], forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.timed = Timed(_WIDTH, forward_s, backward_s)
        self.orders, self.obey = Path(orders), obey

    def forward(self, x: Tensor) -> Tensor:
        order = self.orders / str(os.getpid())
        if order.exists():
            self.obey(order.read_text())
        return self.timed(x)


def obeying_layers(layers: int, orders: str, obey: Callable[[str], None], forward_s: float, backward_s: float) -> Model:
    """Returns that many layers; `orders` is the folder of the orders."""
    build = partial(Obeying, orders, obey, forward_s, backward_s)
    specs = (LayerSpec(f"obeying{index}", "Obeying", build) for index in range(layers))
    return Model(tuple(specs), default_loss, check_pure=False)  # a trial would sleep too


def _raise_or_hang(order: str) -> None:
    if order == "raise":
        raise RuntimeError("by order")
    while True:
        time.sleep(0.001)


def obeying(layers: int, orders: str) -> Model:
    """Returns layers that raise RuntimeError by an order to raise, and never return by any other."""
    return obeying_layers(layers, orders, _raise_or_hang, _FORWARD_S, _BACKWARD_S)
