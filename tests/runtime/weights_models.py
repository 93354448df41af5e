"""Models as users write them, for exports: the same nn.Sequential that a program without bamboo builds."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Odd(nn.Module):
    """Has a tensor under two names, a buffer that is not persistent, and weights in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv: nn.Module = nn.Conv2d(1, 4, 3, padding=1)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first = nn.Linear(16, 8)
        self.again = self.first
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scratch", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x.reshape(-1, 1, 4, 8)).mean(dim=1).reshape(len(x), 32)[:, :16]
        return self.norm(self.again(hidden)) * self.scratch


def sequential() -> nn.Sequential:
    """Returns a model with a tie between its first and its last linear layer."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.ReLU(), Odd(), nn.Linear(8, 32), nn.Linear(32, 32))
    model[5].weight = model[0].weight
    return model
