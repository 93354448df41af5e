"""The model, the data and the loop's numbers that all jobs of `bamboo bench referee` share."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

STEPS = int(os.environ.get("STEPS", "120"))
EVERY, BATCH, RANKS = 20, 8, 2  # steps between two checkpoints; samples of a rank
TIMEOUT_S = 10.0  # how long a rank waits for one that is silent, wherever a system has such a setting
WIDTH, RATE = 512, 1e-3
_WAIT_S = 0.02


class Wait(nn.Module):
    """Passes its input on, late: a step of two takes 40 ms, in which the processor is free for whoever starts again."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the input."""
        time.sleep(_WAIT_S)
        return inputs


def model() -> nn.Sequential:
    """Returns a quarter of a million weights, the same at each call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    first = (Wait(), nn.Linear(16, WIDTH), nn.Tanh())
    return nn.Sequential(*first, Wait(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def samples_of(step: int, rank: int) -> list[int]:
    """Returns the numbers of the samples of a rank in a step: they depend on nothing else."""
    first = (step * RANKS + rank) * BATCH
    return list(range(first, first + BATCH))


def batch(samples: list[int]) -> tuple[Tensor, Tensor]:
    """Returns inputs [samples, 16] and targets [samples, 1]."""
    inputs = torch.stack([torch.randn(16, generator=torch.Generator().manual_seed(each)) for each in samples])
    return inputs, inputs.sum(1, keepdim=True)


def optimizer(of: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of a model."""
    return torch.optim.AdamW(of.parameters(), RATE)


def save(state: object, path: Path) -> None:
    """Writes a checkpoint that is there as a whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
