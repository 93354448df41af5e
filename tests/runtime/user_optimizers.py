"""Optimizers of a user's: some keep the promise, and of each kind that breaks it there is one."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.layers import FunctionLayer

_CALLS = [0]
_FLIPS: list[int] = []


def overflowing() -> nn.Sequential:
    """Returns a model whose outputs are too large for float16 in some microbatches."""
    return nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16), nn.Linear(16, 10), FunctionLayer(_scaled_up))


def _scaled_up(outputs: Tensor) -> Tensor:
    return outputs * 1.4e5 * 1e-5


class Lion(torch.optim.Optimizer):
    """Lion (Chen and others, Symbolic Discovery of Optimization Algorithms, 2023)."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["momentum"] * beta1 + p.grad * (1 - beta1)).sign_(), alpha=-group["lr"])
                state["momentum"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
                p.grad.zero_()  # the gradient is the optimizer's own


class Counting(torch.optim.Optimizer):
    """Numbers in its state and in its group decide the step."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr, "t": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["t"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                state["size"] = state.get("size", 1.0) * 0.9
                state["odd"] = not state.get("odd", False)
                p.sub_(p.grad, alpha=group["lr"] * state["size"] / (group["t"] + state["steps"] + state["odd"]))


class _Bad(torch.optim.Optimizer):
    """Plain descent, with a factor that breaks the promise."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})
        self.calls = 0
        self.told: dict[Tensor, float] = {}

    def factor(self, p: Tensor) -> float:
        """Returns the factor of a parameter's step."""
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * self.factor(p))


class InAttribute(_Bad):
    """Counts its calls in an attribute."""

    def factor(self, p: Tensor) -> float:
        self.calls += 1
        return 1.0 / self.calls


class SeldomInAttribute(InAttribute):
    """Counts its calls in an attribute, which decide bits late."""

    def factor(self, p: Tensor) -> float:
        return 1.0 + (super().factor(p) < 1e-4)


class InOwnMapping(_Bad):
    """Keeps state in a mapping of its own."""

    def factor(self, p: Tensor) -> float:
        self.told[p] = self.told.get(p, 1.0) * 0.5
        return self.told[p]


class InModule(_Bad):
    """Keeps state in its module."""

    def factor(self, p: Tensor) -> float:
        _CALLS[0] += 1
        return 1.0 + _CALLS[0]


class Flipping(_Bad):
    """A bit flips in one update of the process."""

    def factor(self, p: Tensor) -> float:
        _FLIPS.append(len(_FLIPS))
        return 1.0 + (len(_FLIPS) == 3)


class Drawing(_Bad):
    """Draws from torch's generator."""

    def factor(self, p: Tensor) -> float:
        return torch.rand(()).item()


class DrawingElsewhere(_Bad):
    """Draws from Python's generator."""

    def factor(self, p: Tensor) -> float:
        return random.random()  # noqa: S311


class LooksAcross(_Bad):
    """Divides by the norm of all gradients."""

    def factor(self, p: Tensor) -> float:
        total = sum(each.grad.square().sum() for group in self.param_groups for each in group["params"])
        return 1.0 / float(total)


class KeepsList(_Bad):
    """Keeps a list in its state."""

    def factor(self, p: Tensor) -> float:
        self.state[p].setdefault("past", []).append(1.0)
        return 1.0


class OfWholeTensor(_Bad):
    """Divides by the norm of a tensor: no shard has it."""

    def factor(self, p: Tensor) -> float:
        return 1.0 / float(torch.linalg.vector_norm(p.grad))


class WithoutRate(torch.optim.Optimizer):
    """Has no rate."""

    def __init__(self, params: Iterable[Tensor]):
        super().__init__(params, {})


def halving(step: int, *, every: int = 2) -> float:
    """Returns the factor of a schedule: half of it after every some steps."""
    return float(0.5 ** (step // every))


def above(step: int, monitored: float | None, *, limit: float = 1.0) -> float:
    """Returns the factor of a schedule that goes by a figure: a quarter while it is above a limit, or not known yet."""
    return 1.0 if monitored is not None and monitored < limit else 0.25


_ASKED = [0]


def calls(step: int) -> float:
    """Returns a factor that depends on the calls before."""
    _ASKED[0] += 1
    return 1.0 / _ASKED[0]


def bad_factor(step: int) -> float:
    """Returns a factor that is no rate."""
    return float("nan")
