"""The interface of a model: a list of layers that can be built one by one, a loss, and ties between layers.

Only the workers that need a layer build it. Its builder draws the initial weights from torch's default generator, which
the caller has seeded with the key of the layer: every worker gets the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from engine.core.errors import Problem, UserError

Tensors = tuple[Tensor, ...]
Loss = Callable[[Tensors, Tensors], Tensor]  # of (outputs, targets)
MAX_TENSORS = 16  # that leave a stage


@dataclass(frozen=True, slots=True)
class ModuleCopy:
    """The builder of a layer that is a module already: it returns a copy."""

    name: str
    module: nn.Module

    def __call__(self) -> nn.Module:
        """Returns a copy of the module; raises UserError if copy.deepcopy fails."""
        try:
            return copy.deepcopy(self.module)
        except Exception as error:
            hint = "such as torch.nn.utils.parametrizations.weight_norm in place of torch.nn.utils.weight_norm"
            found = f"{self.name!r}: {type(error).__name__}: {error}"
            raise UserError([Problem("model", "layers that copy.deepcopy can copy", found, hint)]) from error


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

    A layer is a `LayerSpec`, a module or a function; the last two become specs. `loss` maps (outputs, targets) to a
    scalar, the mean over the microbatch; `metric`, if any, does the same for a figure of merit such as accuracy, and so
    does each of the `metrics`, by name. With `check_pure`, each layer is tried before training. `shared_buffers` has
    the uses of each buffer that several layers have copies of, as (layer index, buffer name): no forward may change it.
    With `is_cut_by_sample`, dimension 0 of all that the loss takes is the sample, and the loss of the first samples is
    that of their rows. In evaluation the loss takes the first `num_loss_outputs` outputs and metrics take the others;
    with 0, both take all.
    """

    layers: tuple[LayerSpec, ...]
    loss: Loss
    ties: tuple[Tie, ...] = ()
    metric: Loss | None = None
    check_pure: bool = True
    shared_buffers: tuple[tuple[tuple[int, str], ...], ...] = ()
    metrics: Mapping[str, Loss] = field(default_factory=dict)
    is_cut_by_sample: bool = True
    num_loss_outputs: int = 0

    def __post_init__(self) -> None:
        """Makes specs of layers that are none; raises TypeError for a field of another type."""
        object.__setattr__(self, "layers", tuple(_specs(self.layers)))
        for name, function in (("loss", self.loss), ("metric", self.metric)):
            if not callable(function) and (name, function) != ("metric", None):
                raise TypeError(f"Model: expected {name} as a function of (outputs, targets), found {_kind(function)}")


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch: the inputs of the first layer, and the targets of the loss, each a tuple of tensors."""

    inputs: Tensors
    targets: Tensors

    def __post_init__(self) -> None:
        """Raises TypeError for a field that is no tuple of tensors."""
        for name, value in (("inputs", self.inputs), ("targets", self.targets)):
            if not (isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value)):
                hint = f"; write {name}=(x,)" if isinstance(value, (Tensor, list)) else ""
                raise TypeError(f"Batch: expected {name} as a tuple of tensors, found {_kind(value)}{hint}")


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
    raise TypeError(f"{where}: expected a tensor or a tuple of tensors, found {_kind(value)}{_remedy(value)}")


def layer_spec(name: str, layer: object) -> LayerSpec:
    """Returns the spec of a layer that is a spec, a module or a function; raises TypeError for any other object."""
    if isinstance(layer, LayerSpec):
        return layer
    if isinstance(layer, type) or not callable(layer):
        hint = ": call it, to make a layer" if isinstance(layer, type) else ""
        raise TypeError(f"layer {name} is {layer if isinstance(layer, type) else type(layer)}{hint}")
    module = layer if isinstance(layer, nn.Module) else FunctionLayer(layer)
    hands, takes = (_names(name, module, attribute) for attribute in ("hands", "takes"))
    return LayerSpec(name, type(module).__name__, ModuleCopy(name, module), hands, takes)


def named_layers(layers: object) -> list[tuple[str, object]]:
    """Returns (name, layer) of an nn.Sequential, with its names, or of a list; raises TypeError for another object."""
    if isinstance(layers, nn.Sequential):
        return list(layers._modules.items())
    if isinstance(layers, (list, tuple, nn.ModuleList)):
        return [(str(index), layer) for index, layer in enumerate(layers)]
    raise TypeError(f"expected an nn.Sequential or a list of layers, found {_kind(layers)}")


def _specs(layers: object) -> Iterator[LayerSpec]:
    for name, layer in named_layers(layers):
        yield layer_spec(name, layer)


def _names(layer_name: str, layer: nn.Module, attribute: str) -> tuple[str, ...]:
    """Returns the names of the skip connections that a layer hands or takes."""
    names = getattr(layer, attribute, ())
    if not (isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"expected a tuple of names as {attribute} of layer {layer_name}, found {names!r}")
    return tuple(names)


def _kind(value: object) -> str:
    """Returns the type of a value in words; of a list or tuple, also its first part that is no tensor."""
    name = type(value).__name__
    if not isinstance(value, (tuple, list)):
        return name
    wrong = next((index for index, part in enumerate(value) if not isinstance(part, Tensor)), None)
    if wrong is None:
        return name if value else f"an empty {name}"
    return f"a {name} with a {type(value[wrong]).__name__} inside, at position {wrong}"


def _remedy(value: object) -> str:
    """Returns the likely correction of a layer's output, to follow a message."""
    if isinstance(value, (tuple, list)) and any(isinstance(part, (tuple, list)) for part in value):
        return ": return out, not (out, (h, c))"
    return ": its forward has no return" if value is None else ""
