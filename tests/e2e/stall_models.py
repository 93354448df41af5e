"""A model of sleeping layers that obey orders from outside: a file in a folder, named after the process."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss
from engine.models.networks.timed import Timed

_WIDTH = 32  # features of the synthetic vectors
_FORWARD_S, _BACKWARD_S = 0.002, 0.004


class Obeying(nn.Module):
    """A sleeping layer; with an order to hang it never returns, with an order to raise it raises RuntimeError."""

    def __init__(self, orders: str) -> None:
        super().__init__()
        self.timed = Timed(_WIDTH, _FORWARD_S, _BACKWARD_S)
        self.orders = Path(orders)

    def forward(self, x: Tensor) -> Tensor:
        order = self.orders / str(os.getpid())
        if order.exists():
            if order.read_text() == "raise":
                raise RuntimeError("by order")
            while True:
                time.sleep(0.001)
        return self.timed(x)


def obeying(layers: int, orders: str) -> Model:
    """Returns that many layers; `orders` is the folder of the orders."""
    specs = (LayerSpec(f"obeying{index}", "Obeying", partial(Obeying, orders)) for index in range(layers))
    return Model(tuple(specs), default_loss, check_pure=False)  # a trial would sleep too
