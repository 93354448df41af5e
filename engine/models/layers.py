"""What a model is to the engine: a list of layers that can be built one by one, a loss, and the ties between layers.

A layer is built only by the worker that needs it. Its builder draws its initial weights from torch's default
generator, which the caller has seeded with the layer's own key: the same weights wherever it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer, not built yet. `kind` is the class name that ``--partition type:regex`` matches.

    `hands` and `takes` are the names of its skip connections (engine.models.skips).
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    hands: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tie:
    """Uses of one parameter as (layer index, parameter name): equal at the start, gradients summed in this order."""

    uses: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as layers 0..L-1; each is called with the tensors that the one before it returned, and with its skips.

    `loss` maps (outputs, targets) to a scalar: the mean over the microbatch. `metric` does the same for a figure
    of merit (accuracy), where the model has one. Without `check_pure` its layers are not tried before training.
    `shared_buffers` names those that several layers hold copies of, as (layer index, buffer name): no forward may
    change one.
    """

    layers: tuple[LayerSpec, ...]
    loss: Callable[[Tensors, Tensors], Tensor]
    ties: tuple[Tie, ...] = ()
    metric: Callable[[Tensors, Tensors], Tensor] | None = None
    check_pure: bool = True
    shared_buffers: tuple[tuple[tuple[int, str], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch: what enters the first layer, and what the loss compares the last layer's outputs with."""

    inputs: Tensors
    targets: Tensors


class FunctionLayer(nn.Module):
    """Wraps a plain callable as a layer without parameters; the function's skip connections are those of the layer."""

    def __init__(self, function: Callable[..., object]):
        super().__init__()
        self.function = function
        self.hands, self.takes = getattr(function, "hands", ()), getattr(function, "takes", ())

    def forward(self, *inputs: object, **named: object) -> object:
        """Calls the function."""
        return self.function(*inputs, **named)


def as_tensors(value: object, where: str) -> Tensors:
    """Returns what a layer gave as a tuple of tensors; raises TypeError naming `where` for anything else."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)) and value and all(isinstance(part, Tensor) for part in value):
        return tuple(value)
    raise TypeError(f"{where}: expected a tensor or a tuple of tensors, found {type(value).__name__}")
