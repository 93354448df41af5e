"""A model of which one layer comes to no end, while its process has a pulse."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss

_FEATURES = 32  # of the synthetic vectors


class Spinning(nn.Module):
    """A linear map that never returns from one of its calls, counted from 0; from none where that is negative."""

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
    """Has three layers; the middle one never returns from that call in one process."""
    return Model(
        (
            LayerSpec("before", "Linear", partial(nn.Linear, _FEATURES, _FEATURES)),
            LayerSpec("middle", "Spinning", partial(Spinning, call)),
            LayerSpec("after", "Linear", partial(nn.Linear, _FEATURES, 1)),
        ),
        default_loss,
    )
