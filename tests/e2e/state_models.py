"""Models whose forwards change state that later forwards read, or whose parameters are of different kinds.

There is one layer of each kind, a model with all of them, and a model of each alone. The output of a layer depends on
its buffers, so a wrong buffer changes all later results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

FEATURES = 32  # of the synthetic vectors
LARGE = 300_000  # elements: above a MiB, so the tensor has its own transfer


class Spectral(nn.Module):
    """Divides its weights by their largest singular value; each forward improves its estimate, in two buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Centred(nn.Module):
    """Subtracts one running mean and multiplies by another, which is a new tensor after each forward."""

    changed: Tensor
    replaced: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("changed", torch.zeros(width))
        self.register_buffer("replaced", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.detach().mean(0)
            self.changed.mul_(0.9).add_(mean, alpha=0.1)
            self.replaced = self.replaced * 0.5 + mean
        return self.linear(x) * self.replaced - self.changed


class Large(nn.Module):
    """Has a large constant buffer, and one that each forward changes somewhere."""

    table: Tensor
    sums: Tensor

    def __init__(self, width: int, size: int = LARGE) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("table", torch.linspace(-1.0, 1.0, size))
        self.register_buffer("sums", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        if self.training:
            self.sums[-width:] += x.detach().mean(0)
        return self.linear(x) + self.table[:width] + 0.1 * torch.tanh(self.sums[-width:])


class Holder(nn.Module):
    """Has a buffer that it shares with another module."""

    same: Tensor

    def __init__(self, same: Tensor) -> None:
        super().__init__()
        self.register_buffer("same", same)


class Aliased(nn.Module):
    """Has one buffer under two names, and views of it: writes by one name are read by another."""

    whole: Tensor
    head: Tensor
    turned: Tensor
    ones: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("whole", torch.zeros(2, width // 2))
        self.register_buffer("head", self.whole[:1])
        self.register_buffer("turned", self.whole.t())
        self.register_buffer("ones", torch.ones(1).expand(width))
        self.inner = Holder(self.whole)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.whole.mul_(0.5).add_(x.detach().mean(0).view(2, -1))
            self.head.add_(1.0)
        return self.linear(x) * self.ones + self.inner.same.reshape(-1) + self.turned.reshape(-1)


class Normed(nn.Module):
    """Has the direction and the length of its weights as separate parameters, and no buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.linear(x), 0.2, self.training)


class HalfFrozen(nn.Module):
    """Trains its weights, but not its bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Experts(nn.Module):
    """Has parameters without a gradient in some microbatches: the data choose one of two, and a third comes late."""

    calls: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.late = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.experts[int(x.detach().sum() > 0)](x)
        if self.training:
            self.calls += 1
        return chosen + self.late(x) if self.calls % 3 != 1 else chosen  # none in the very first microbatch


class Counting(nn.Module):
    """Counts its calls outside of training too, and returns another value each time."""

    calls: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) + torch.sin(self.calls)


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "spectral": Spectral,
    "centred": Centred,
    "large": Large,
    "aliased": Aliased,
    "normed": Normed,
    "half_frozen": HalfFrozen,
    "experts": Experts,
    "counting": Counting,
}


def of_kind(kind: str) -> list[nn.Module]:
    """Makes a model of one kind of layer, and one more that returns a number."""
    return [*(KINDS[kind](FEATURES) for _ in KINDS), nn.Linear(FEATURES, 1)]


def all_kinds() -> list[nn.Module]:
    """Makes a model with a layer of each kind."""
    return [*(make(FEATURES) for make in KINDS.values()), nn.Linear(FEATURES, 1)]
