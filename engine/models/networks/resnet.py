"""ResNet 18 to 152: the stem, one layer per residual block, the head.

Small images (height below 64) get a stem of one 3x3 convolution in place of the 7x7 one with pooling, which would
shrink them too much. No operation is in place, because the input of a layer belongs to the previous layer.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.data import DataFacts
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss

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
