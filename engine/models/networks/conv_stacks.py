"""VGG-19 and AlexNet: a layer is a convolution or a fully connected layer with its activation, pooling and dropout.

The first layer scales up images that are too small for the network. `width` is the number of channels of the first
convolution, `hidden` the width of the fully connected layers; the published networks have 64 and 4096.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from engine.models.data import DataFacts
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss

# An entry per convolution: its channels as a multiple of `width`, and whether a pooling follows.
VGG19_CONVS = (
    *((1, False), (1, True), (2, False), (2, True)),
    *((4, False), (4, False), (4, False), (4, True)),
    *((8, False), (8, False), (8, False), (8, True)),
    *((8, False), (8, False), (8, False), (8, True)),
)
VGG19_LEAST_SIDE = 32  # five poolings halve it to 1
# The same with (kernel, stride, padding) between.
ALEXNET_CONVS = (
    (1, (11, 4, 2), True),
    (3, (5, 1, 2), True),
    (6, (3, 1, 1), False),
    (4, (3, 1, 1), False),
    (4, (3, 1, 1), True),
)
ALEXNET_LEAST_SIDE = 63  # below, the input of the last pooling is empty


class Conv(nn.Sequential):
    """A convolution, a ReLU and an optional pooling; `side` > 0 first scales the images to side x side."""

    def __init__(self, num_inputs: int, num_outputs: int, kernel: tuple[int, int, int], pool_kernel: int, side: int):
        size, stride, padding = kernel
        conv = nn.Conv2d(num_inputs, num_outputs, size, stride, padding)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        before = [nn.Upsample((side, side), mode="bilinear")] if side else []
        after = [nn.MaxPool2d(pool_kernel, 2)] if pool_kernel else []
        super().__init__(*before, conv, nn.ReLU(), *after)


class AveragePool(nn.Module):
    """Averages feature maps over `area` x `area` windows, which may overlap: the sums of `nn.AdaptiveAvgPool2d`.

    That one's backward has no deterministic form on GPUs; these are two products, one for each side.
    """

    def __init__(self, area: int):
        super().__init__()
        self.area = area

    def forward(self, maps: Tensor) -> Tensor:
        """Returns maps of area x area."""
        height, width = maps.shape[-2:]
        return self._windows(maps, height) @ maps @ self._windows(maps, width).T

    def _windows(self, maps: Tensor, side: int) -> Tensor:
        """Returns the share of each place of a side in each window."""
        window = torch.arange(self.area, device=maps.device)[:, None]
        place = torch.arange(side, device=maps.device)
        is_in = (place >= window * side // self.area) & (place * self.area < (window + 1) * side)
        return is_in.to(maps.dtype) / is_in.sum(1, keepdim=True)


class Linear(nn.Sequential):
    """Dropout, a linear map and, except in the last, a ReLU; `area` > 0 first pools feature maps to area x area."""

    def __init__(self, num_inputs: int, num_outputs: int, dropout: float, is_last: bool, area: int):
        parts: list[nn.Module] = [AveragePool(area), nn.Flatten()] if area else []
        parts += [nn.Dropout(dropout), nn.Linear(num_inputs, num_outputs)]
        super().__init__(*parts, *([] if is_last else [nn.ReLU()]))


def vgg19(facts: DataFacts, *, width: int = 64, hidden: int = 4096, dropout: float = 0.5) -> Model:
    """Returns the network of 19 weight layers of Simonyan and Zisserman (2014), without batch norm."""
    convs = [(multiple, (3, 1, 1), 2 if pools else 0) for multiple, pools in VGG19_CONVS]
    return _stack(facts, convs, VGG19_LEAST_SIDE, 7, width, hidden, dropout)


def alexnet(facts: DataFacts, *, width: int = 64, hidden: int = 4096, dropout: float = 0.5) -> Model:
    """Returns the one-column network of Krizhevsky (2014)."""
    convs = [(multiple, kernel, 3 if pools else 0) for multiple, kernel, pools in ALEXNET_CONVS]
    return _stack(facts, convs, ALEXNET_LEAST_SIDE, 6, width, hidden, dropout)


def _stack(
    facts: DataFacts,
    convs: list[tuple[int, tuple[int, int, int], int]],
    least_side: int,
    area: int,
    width: int,
    hidden: int,
    dropout: float,
) -> Model:
    """Returns a chain of the convolutions and three fully connected layers; dropout precedes the second and third."""
    layers: list[LayerSpec] = []

    def add(layer: Callable[..., nn.Module], *args: object) -> None:
        layers.append(LayerSpec(f"{layer.__name__.lower()}{len(layers)}", layer.__name__, partial(layer, *args)))

    num_inputs = facts.channels
    side = least_side if min(facts.height, facts.width) < least_side else 0
    for multiple, kernel, pool_kernel in convs:
        add(Conv, num_inputs, width * multiple, kernel, pool_kernel, 0 if layers else side)
        num_inputs = width * multiple
    add(Linear, num_inputs * area * area, hidden, 0.0, False, area)
    add(Linear, hidden, hidden, dropout, False, 0)
    add(Linear, hidden, facts.num_classes, dropout, True, 0)
    return Model(tuple(layers), default_loss)
