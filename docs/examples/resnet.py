"""A ResNet as one writes it: an ordinary module with BatchNorm and skip connections. Nothing here knows of bamboo."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions, and the input added to their output."""

    def __init__(self, inner: int, outer: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        is_same = stride == 1 and inner == outer
        self.conv3 = nn.Identity() if is_same else nn.Conv2d(inner, outer, 1, stride, bias=False)
        self.bn3 = nn.Identity() if is_same else nn.BatchNorm2d(outer)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, outer, height / stride, width / stride]."""
        hidden = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(hidden)) + self.bn3(self.conv3(x)))


class ResNet(nn.Module):
    """A small ResNet for pictures of one channel."""

    def __init__(self, width: int = 8, classes: int = 10):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        shapes = ((width, width, 1), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1))
        self.blocks = nn.ModuleList(Block(*each) for each in shapes)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Returns logits [batch, classes]."""
        x = torch.relu(self.bn(self.conv(pictures)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))
