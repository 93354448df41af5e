"""The interface of a model: a list of layers that can be built one by one, a loss, and ties between layers.

Only the workers that need a layer build it. Its builder draws the initial weights from torch's default generator, which
the caller has seeded with the key of the layer: every worker gets the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The builder of one layer. `kind` is the class name that ``--partition type:regex`` matches.

    `hands` and `takes` are the names of its skip connections (engine.models.skips).
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    hands: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tie:
    """Uses of one parameter as (layer index, parameter name): initially equal, gradients summed in this order."""

    uses: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as layers 0..L-1; each is called with the outputs of the previous layer and with its skips.

    `loss` maps (outputs, targets) to a scalar, the mean over the microbatch; `metric`, if any, does the same for a
    figure of merit such as accuracy. With `check_pure`, each layer is tried before training. `shared_buffers` has the
    uses of each buffer that several layers have copies of, as (layer index, buffer name): no forward may change it.
    """

    layers: tuple[LayerSpec, ...]
    loss: Callable[[Tensors, Tensors], Tensor]
    ties: tuple[Tie, ...] = ()
    metric: Callable[[Tensors, Tensors], Tensor] | None = None
    check_pure: bool = True
    shared_buffers: tuple[tuple[tuple[int, str], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch: the inputs of the first layer, and the targets of the loss."""

    inputs: Tensors
    targets: Tensors


class FunctionLayer(nn.Module):
    """A layer without parameters that calls a function; it has the skip connections of the function."""

    def __init__(self, function: Callable[..., object]):
        super().__init__()
        self.function = function
        self.hands, self.takes = getattr(function, "hands", ()), getattr(function, "takes", ())

    def forward(self, *inputs: object, **named: object) -> object:
        """Calls the function."""
        return self.function(*inputs, **named)


def as_tensors(value: object, where: str) -> Tensors:
    """Returns the output of a layer as a tuple of tensors; raises TypeError with `where` if it has another type."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)) and value and all(isinstance(part, Tensor) for part in value):
        return tuple(value)
    raise TypeError(f"{where}: expected a tensor or a tuple of tensors, found {type(value).__name__}")
