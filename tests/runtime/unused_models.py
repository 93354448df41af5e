"""Models with parameters that get no gradient: never called, under no_grad, in an expert that no sample reaches."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Backbone(nn.Module):
    """Runs its weights without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.linear(x).tanh()


class Aside(nn.Module):
    """Returns an output that the next layer does not use; has a submodule that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.aside = nn.Linear(16, 4)
        self.never = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.aside(x)


class Between(nn.Module):
    """Hands both on; only one of them is used later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, aside: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(aside)


class Router(nn.Module):
    """Sends a microbatch to one of four experts, by its first sample; the last one is never reached."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return x + self.experts[int(x[0, 0].abs().item() * 1000) % 3](x).tanh()


class Detached(nn.Module):
    """Uses its input without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.detach())


class Borrowing(nn.Module):
    """Uses the weight of another layer, without a gradient."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(x, self.weight).detach()


def routed(*, detached: bool = False, borrows: bool = False) -> list[nn.Module]:
    """Returns the layers; with `borrows` two more have one weight, and one of them gives it no gradient."""
    layers = [Backbone(), Aside(), Between(), Router()]
    if detached:
        layers.append(Detached())
    if borrows:
        owner = nn.Linear(16, 16)
        layers += [owner, Borrowing(owner.weight)]
    return [*layers, nn.Linear(16, 1)]


class Whole(nn.Module):
    """An ordinary module with a frozen backbone and a submodule that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.never = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.backbone(x)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return self.head(hidden)


def whole() -> Whole:
    return Whole()
