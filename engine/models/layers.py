"""The interface of a model: a list of layers that can be built one by one, a loss, and ties between layers.

Only the workers that need a layer build it. Its builder draws the initial weights from torch's default generator, which
the caller has seeded with the key of the layer: every worker gets the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from torch import Tensor, nn

from engine.core.errors import Problem, UserError, nearest

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
            failure = f"{self.name!r}: {type(error).__name__}: {error}"
            raise UserError([Problem("model", "layers that copy.deepcopy can copy", failure, hint)]) from error


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The builder of a layer; `kind` is what ``--partition type:regex`` matches, `hands` and `takes` are skips."""

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
    with 0, both take all. `notes` are for the user: what could not be split. `straight` are layers of the recorder that
    are lists of torch's own operations (engine.models.traced.straight): a shorter trial is enough for them. `alike`
    has the first layer with the same operations and sizes for each of these: one trial is enough for both.
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
    notes: tuple[str, ...] = ()
    straight: frozenset[int] = frozenset()
    alike: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Makes specs of layers that are none; raises TypeError for a field of another type."""
        specs = tuple(layer_spec(name, layer) for name, layer in named_layers(self.layers))
        object.__setattr__(self, "layers", specs)
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


def sizes_of(tensor: Tensor | None) -> object:
    """Returns what a kernel is chosen by: shape, strides and dtype of a tensor, and whether it has a gradient."""
    return tensor if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


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


def _names(layer_name: str, layer: nn.Module, attribute: str) -> tuple[str, ...]:
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


# Trees: values in dicts, lists, tuples and dataclasses of any depth; all other values are leaves.
#
# A tree can be flattened into its tensors and its form (the tree without them), and unflattened.


class _Place(Enum):
    TENSOR = "tensor"  # the place of a tensor in a form


def parts_of(tree: object) -> dict[Any, Any] | None:
    """Returns the parts of a tree by key, index or field name; None for a leaf."""
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        return {each.name: getattr(tree, each.name) for each in fields(tree) if each.init}
    return None


def with_parts(tree: Any, parts: Iterable[Any]) -> Any:
    """Returns a tree of the same type with other parts, in the order of `parts_of`."""
    if isinstance(tree, dict):
        return type(tree)(zip(tree, parts, strict=True))
    if hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*parts)
    if isinstance(tree, (list, tuple)):
        return type(tree)(parts)
    return replace(tree, **dict(zip(parts_of(tree) or (), parts, strict=True)))


def map_leaves(do: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the tree with each leaf replaced by `do(leaf)`, called in order."""
    parts = parts_of(tree)
    return do(tree) if parts is None else with_parts(tree, [map_leaves(do, part) for part in parts.values()])


def flatten(tree: object) -> tuple[object, Tensors]:
    """Returns the form of a tree, and its tensors in order."""
    tensors: list[Tensor] = []

    def take(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return _Place.TENSOR

    return map_leaves(take, tree), tuple(tensors)


def unflatten(form: object, tensors: Tensors) -> Any:
    """Returns the tree of a form with these tensors: the inverse of `flatten`."""
    coming = iter(tensors)
    return map_leaves(lambda leaf: next(coming) if leaf is _Place.TENSOR else leaf, form)


# Skip connections: named tensors that a layer hands to a later layer, past the layers in between.
#
#     layer 0  returns (own, skip)
#     layer 1  is called with (own), returns (own); the wrapper passes skip through
#     layer 2  is called with (own, skip)
#
# The tensor travels with the outputs of the layers in between, so that transfers, recovery and gradients need no rule
# for it. The price is a transfer at every border on its way.
#
# Rules: one layer hands a name, one or more later layers take it. The tensors that a layer hands are the last ones of
# its outputs; those that it takes are its last arguments.


def with_skips(model: Model) -> Model:
    """Returns the model in which layers pass skip tensors through; raises UserError if names do not match."""
    if problems := list(_mismatches(model.layers)):
        raise UserError(problems)
    last_taker = {name: index for index, layer in enumerate(model.layers) for name in layer.takes}
    layers: list[LayerSpec] = []
    entering: tuple[str, ...] = ()
    for index, layer in enumerate(model.layers):
        leaving = tuple(name for name in (*entering, *layer.hands) if last_taker[name] > index)
        passes_on = replace(layer, build=partial(_build, layer, entering, leaving))
        layers.append(passes_on if entering or leaving else layer)
        entering = leaving
    return replace(model, layers=tuple(layers))


def _build(layer: LayerSpec, entering: Sequence[str], leaving: Sequence[str]) -> nn.Module:
    module = layer.build()
    # Not wrapped in a module: that would change the names of its parameters, which ties and hashes use.
    module.forward = partial(_pass_on, module.forward, layer, entering, leaving)
    return module


def _pass_on(
    forward: Callable[..., object], layer: LayerSpec, entering: Sequence[str], leaving: Sequence[str], *inputs: Tensor
) -> Tensors:
    """Calls a layer with its own inputs and its skips; returns its own outputs and all skips that go on."""
    num_own = len(inputs) - len(entering)
    travelling = dict(zip(entering, inputs[num_own:], strict=True))
    outputs = as_tensors(forward(*inputs[:num_own], *(travelling[name] for name in layer.takes)), layer.name)
    num_own = len(outputs) - len(layer.hands)
    if num_own < 1:
        expected = f"its own outputs, followed by {', '.join(layer.hands)}"
        raise TypeError(f"{layer.name}: expected {expected}, found {len(outputs)} tensors")
    travelling.update(zip(layer.hands, outputs[num_own:], strict=True))
    return (*outputs[:num_own], *(travelling[name] for name in leaving))


def _mismatches(layers: Sequence[LayerSpec]) -> Iterator[Problem]:
    handing = _by_name(layers, [layer.hands for layer in layers])
    taking = _by_name(layers, [layer.takes for layer in layers])
    for name, givers in handing.items():
        if len(givers) > 1:
            yield Problem("model", f"one layer that hands {name!r}", _layer_names(layers, givers))
        if name not in taking:
            cause, hint = (
                f"none; {_layer_names(layers, givers)} hands it",
                nearest(name, taking.keys() - handing.keys()),
            )
            yield Problem("model", f"a later layer that takes {name!r}", cause, hint)
    for name, takers in taking.items():
        if name not in handing:
            none = f"none; {_layer_names(layers, takers)} takes it"
            yield Problem("model", f"an earlier layer that hands {name!r}", none, nearest(name, handing))
        elif takers[0] <= handing[name][0]:
            giver, taker = _layer_names(layers, handing[name][:1]), _layer_names(layers, takers[:1])
            expected = f"{name!r} to be taken by a later layer than hands it"
            yield Problem("model", expected, f"{giver} hands it and {taker} takes it")


def _by_name(layers: Sequence[LayerSpec], names: Sequence[tuple[str, ...]]) -> dict[str, list[int]]:
    indexes: dict[str, list[int]] = {}
    for index, listed in enumerate(names):
        for name in listed:
            indexes.setdefault(name, []).append(index)
    return indexes


def _layer_names(layers: Sequence[LayerSpec], indexes: Sequence[int]) -> str:
    return " and ".join(f"layer {index} ({layers[index].name})" for index in indexes)
