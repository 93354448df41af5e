"""The models that come with the program, as lists of layers."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.data import DataFacts
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss

# VGG-19 and AlexNet: a layer is a convolution or a fully connected layer with its activation, pooling and dropout.
#
# The first layer scales up images that are too small for the network. `width` is the number of channels of the first
# convolution, `hidden` the width of the fully connected layers; the published networks have 64 and 4096.

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
    """Averages feature maps over `area` x `area` windows by two products, deterministic on GPUs too."""

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


# The smallest model: fully connected layers, for vectors (regression) and for flattened images (classes).
class Hidden(nn.Sequential):
    """A linear map of the flattened input, a GELU and dropout: [size, ...] to [size, width]."""

    def __init__(self, num_inputs: int, width: int, dropout: float):
        super().__init__(nn.Flatten(), nn.Linear(num_inputs, width), nn.GELU(), nn.Dropout(dropout))


def mlp(facts: DataFacts, *, width: int = 64, depth: int = 3, dropout: float = 0.0) -> Model:
    """Returns a model of `depth` hidden layers and a linear head."""
    classifies = facts.task == "classify"
    num_inputs = facts.channels * facts.height * facts.width if classifies else facts.features
    num_outputs = facts.num_classes if classifies else facts.outputs
    hidden = [
        LayerSpec(f"hidden{index}", "Hidden", partial(Hidden, width if index else num_inputs, width, dropout))
        for index in range(depth)
    ]
    head = LayerSpec("head", "Linear", partial(nn.Linear, width, num_outputs))
    return Model((*hidden, head), default_loss)


# ResNet 18 to 152: the stem, one layer per residual block, the head.
#
# Small images (height below 64) get a stem of one 3x3 convolution in place of the 7x7 one with pooling, which would
# shrink them too much. No operation is in place, because the input of a layer belongs to the previous layer.

SMALL_HEIGHT = 64


def resnet(blocks: tuple[int, int, int, int], bottleneck: bool, facts: DataFacts, *, width: int = 64) -> Model:
    """Returns a network of four groups of `blocks`; `width` is the number of channels of the first group."""
    layers = [LayerSpec("stem", "Stem", partial(Stem, facts.channels, width, facts.height < SMALL_HEIGHT))]
    block = Bottleneck if bottleneck else BasicBlock
    num_inputs = width
    for group, num_blocks in enumerate(blocks):
        for index in range(num_blocks):
            stride = 2 if group > 0 and index == 0 else 1
            build = partial(block, num_inputs, width * 2**group, stride)
            layers.append(LayerSpec(f"group{group}.block{index}", block.__name__, build))
            num_inputs = width * 2**group * block.expansion
    layers.append(LayerSpec("head", "Head", partial(Head, num_inputs, facts.num_classes)))
    return Model(tuple(layers), default_loss)


def _conv(num_inputs: int, num_outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(num_inputs, num_outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(num_outputs))


class Stem(nn.Module):
    """Images [size, channels, height, width] to feature maps: of the same sides if small, else a quarter of them."""

    def __init__(self, channels: int, width: int, is_small: bool):
        super().__init__()
        self.conv = _conv(channels, width, 3) if is_small else _conv(channels, width, 7, 2)
        self.pool = nn.Identity() if is_small else nn.MaxPool2d(3, 2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the first feature maps."""
        return self.pool(F.relu(self.conv(images)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, added to the (projected) input."""

    expansion = 1

    def __init__(self, num_inputs: int, width: int, stride: int):
        super().__init__()
        self.first = _conv(num_inputs, width, 3, stride)
        self.second = _conv(width, width, 3)
        self.shortcut = _shortcut(num_inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Returns feature maps of 1/stride of each side."""
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the width, added to the (projected) input."""

    expansion = 4

    def __init__(self, num_inputs: int, width: int, stride: int):
        super().__init__()
        self.down = _conv(num_inputs, width, 1)
        self.middle = _conv(width, width, 3, stride)
        self.up = _conv(width, width * self.expansion, 1)
        self.shortcut = _shortcut(num_inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Returns feature maps of 1/stride of each side."""
        return F.relu(self.up(F.relu(self.middle(F.relu(self.down(x))))) + self.shortcut(x))


def _shortcut(num_inputs: int, num_outputs: int, stride: int) -> nn.Module:
    if stride == 1 and num_inputs == num_outputs:
        return nn.Identity()
    return _conv(num_inputs, num_outputs, 1, stride)


class Head(nn.Module):
    """Feature maps to class scores [size, num_classes]: mean over the area, then a linear map."""

    def __init__(self, num_inputs: int, num_classes: int):
        super().__init__()
        self.scores = nn.Linear(num_inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the class scores."""
        return self.scores(x.mean(dim=(2, 3)))


# `timed` simulates an accelerator: its layers sleep for the time that a device would compute.
#
# Activations of [microbatch size, width] floats, parameters, gradients and updates are real, but small. The module
# keeps the measured times of the layers, because an ideal step time must be computed from these.
#
# Half of a backward is for the input and half for the weights. Each is a node of its own in the graph, so that a split
# backward runs one half. In a first layer, whose input needs no gradient, all of it is for the weights.


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
