"""A net and data of a user's own, whose data can be broken, slow or harmless without a change of the code."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

BROKEN, SLEEP_S = "BROKEN_SAMPLE", "SLEEP_S"  # variables: the sample that cannot be read, the time of each


class Samples(Dataset[tuple[Tensor, int]]):
    """A hundred and sixty samples, so ten steps of sixteen see each once."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if os.environ.get(BROKEN) == str(index):
            raise ValueError(f"sample {index} is broken")
        time.sleep(float(os.environ.get(SLEEP_S, "0")))
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3


def samples() -> Samples:
    return Samples()


def normed() -> nn.Module:
    """Its buffers change in each forward."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
