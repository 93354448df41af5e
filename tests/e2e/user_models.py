"""Models as users write them: some train, the others each have one deliberate fault.

A layer's first call is the probe that learns its shapes; call 1 + m of the first step is its forward of microbatch m.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss

FEATURES = 32  # of the synthetic vectors


class Split(nn.Module):
    """Returns a tuple: hidden values, index of each sample's largest feature, the input; one bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), x.argmax(dim=1), x


class Middle(nn.Module):
    """Changes the hidden values only, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, hidden: Tensor, place: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return nn.functional.dropout(self.linear(hidden).relu(), 0.2, self.training), place, x


class Join(nn.Module):
    """Reads all three; the integers are indices of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(FEATURES, FEATURES)
        self.out = nn.Linear(FEATURES, 1)

    def forward(self, hidden: Tensor, place: Tensor, x: Tensor) -> Tensor:
        return self.out(hidden * self.embedding(place) + x)


def tuples() -> list[nn.Module]:
    """Passes an integer tensor and one without gradient from the first layer to the last."""
    return [Split(), Middle(), Middle(), Join()]


def transposing() -> list[nn.Module | Callable[[Tensor], Tensor]]:
    """Returns layers that output non-contiguous tensors, and layers whose order of addition depends on strides."""
    return [
        nn.Linear(FEATURES, FEATURES * 16),
        lambda x: x.view(-1, FEATURES, 16).transpose(1, 2),
        lambda x: (x * x).mean(dim=2) + x.sum(dim=2),
        nn.Linear(16, 16),
        lambda x: x.unsqueeze(2).expand(-1, -1, 8),
        lambda x: x.transpose(0, 1),
        nn.Linear(8, FEATURES),
        lambda x: x.mean(dim=(0, 2)).unsqueeze(1),
    ]


class OnCall(nn.Module):
    """A linear map that calls a function at its n-th call, counted from 0."""

    def __init__(self, call: int, action: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.call, self.action, self.num_calls = call, action, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        made = self.linear(x)
        return self.action(made) if self.num_calls == self.call + 1 else made


class Mixed(nn.Module):
    """Holds parameters of two floating types; one has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.ones(FEATURES, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).float()


def mixed_dtypes() -> list[nn.Module]:
    """Has float32 and float64 parameters in one stage, and in one layer."""
    return [Mixed(), nn.Linear(FEATURES, FEATURES), Mixed(), nn.Linear(FEATURES, 1)]


def in_place() -> list[nn.Module]:
    """Returns layers that overwrite their inputs."""
    return [
        nn.ReLU(inplace=True),
        nn.Linear(FEATURES, FEATURES),
        nn.ReLU(inplace=True),
        nn.Linear(FEATURES, FEATURES),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(FEATURES, 1),
    ]


class Down(nn.Module):
    """Halves the features, and hands its scaled input to the layer that doubles them again."""

    def __init__(self, features: int, name: str = "") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))
        self.linear = nn.Linear(features, features // 2)
        self.hands = (name,) if name else ()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x).relu(), x * self.scale


class Up(nn.Module):
    """Doubles the features, and joins them with the handed input."""

    def __init__(self, features: int, name: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(features // 2, features)
        self.takes = (name,) if name else ()

    def forward(self, x: Tensor, handed: Tensor) -> tuple[Tensor, ...]:
        return (nn.functional.dropout(self.linear(x), 0.2, self.training) + handed,)


class DownByHand(Down):
    """Passes on all values beside its input."""

    def forward(self, x: Tensor, *handed: Tensor) -> tuple[Tensor, ...]:
        own, mine = super().forward(x)
        return own, *handed, mine


class UpByHand(Up):
    """Passes on all values beside its input, but the last."""

    def forward(self, x: Tensor, *handed: Tensor) -> tuple[Tensor, ...]:
        return *super().forward(x, handed[-1]), *handed[:-1]


class TurnByHand(nn.Linear):
    """Passes on all values beside its input."""

    def forward(self, x: Tensor, *handed: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(x), *handed


def _tied(layers: list[nn.Module], first: int, later: int) -> list[nn.Module]:
    layers[later].weight = layers[first].weight
    return layers


def u_shape() -> list[nn.Module]:
    """Goes down and up again, with a skip connection on each level, over two tied layers at the bottom."""
    half, quarter = FEATURES // 2, FEATURES // 4
    turns = [nn.Linear(quarter, quarter), nn.Linear(quarter, quarter)]
    down = [Down(FEATURES, "outer"), Down(half, "inner")]
    return _tied([*down, *turns, Up(half, "inner"), Up(FEATURES, "outer"), nn.Linear(FEATURES, 1)], 2, 3)


def u_shape_by_hand() -> list[nn.Module]:
    """Returns the same without skip connections: each layer gets all values for the layers after it."""
    half, quarter = FEATURES // 2, FEATURES // 4
    turns = [TurnByHand(quarter, quarter), TurnByHand(quarter, quarter)]
    down = [DownByHand(FEATURES), DownByHand(half)]
    return _tied([*down, *turns, UpByHand(half), UpByHand(FEATURES), nn.Linear(FEATURES, 1)], 2, 3)


def _raise(x: Tensor) -> Tensor:
    raise RuntimeError("planted in a forward")


def _kill_this_process(*_: object) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL returns to nobody")


def _three_layers(middle: Callable[[], nn.Module]) -> Model:
    """Puts `middle` into stage 1 of 3; unlike a list of modules, it is built by that stage's worker only."""
    return Model(
        (
            LayerSpec("before", "Linear", partial(nn.Linear, FEATURES, FEATURES)),
            LayerSpec("middle", "OnCall", middle),
            LayerSpec("after", "Linear", partial(nn.Linear, FEATURES, 1)),
        ),
        default_loss,
    )


def raises_in_forward(call: int = 5) -> Model:
    """Raises in the first microbatch of step 1 where a step has 4 microbatches."""
    return _three_layers(partial(OnCall, call, _raise))


def _raise_in_worker_1(x: Tensor) -> Tensor:
    print("\x1b[31mabout to raise\x1b[0m")
    if Path("/proc/self/comm").read_text() == "bamboo-1\n":
        raise RuntimeError("my own bug: cache is corrupt")
    return x


def raises_once(call: int = 5) -> Model:
    """Raises in the first microbatch of step 1 where a step has 4 microbatches, but not in an heir."""
    return _three_layers(partial(OnCall, call, _raise_in_worker_1))


def wrong_loss() -> Model:
    """Has a loss that cannot be called with what it gets."""
    return Model((nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, 1)), nn.CrossEntropyLoss())  # type: ignore[arg-type]


def _raise_in_constructor() -> nn.Module:
    raise RuntimeError("planted in a constructor")


def raises_when_built() -> Model:
    """Raises in the constructor of the middle layer."""
    return _three_layers(_raise_in_constructor)


def another_shape() -> Model:
    """Drops a feature in the first microbatch, after the probe."""
    return _three_layers(partial(OnCall, 1, lambda x: x[:, 1:]))


def not_a_number(call: int = 5) -> Model:
    """Returns NaN in the first microbatch of step 1 where a step has 4 microbatches."""
    return _three_layers(partial(OnCall, call, lambda x: x * torch.nan))


def infinite_gradient(call: int = 5) -> Model:
    """Has a finite loss, and in the first microbatch of step 1 a gradient that is not."""
    return _three_layers(partial(OnCall, call, lambda x: x + (x - x.detach()).sqrt()))


def dies_when_built() -> Model:
    """Is killed while it builds the middle layer."""
    return _three_layers(_kill_this_process)  # type: ignore[arg-type]


def dies_in_step(call: int = 6) -> Model:
    """Is killed inside the second microbatch of step 1 where a step has 4 microbatches."""
    return _three_layers(partial(OnCall, call, _kill_this_process))


def _loop(x: Tensor) -> Tensor:
    while True:
        pass


def loops(call: int = 6) -> Model:
    """Never returns from the second microbatch of step 1 where a step has 4 microbatches."""
    return _three_layers(partial(OnCall, call, _loop))


def raises() -> Model:
    """Is a factory that raises."""
    raise RuntimeError("planted in a factory")
