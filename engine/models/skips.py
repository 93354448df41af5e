"""Skip connections: tensors that a layer hands to a later layer than the next one, by name.

Such a tensor travels with what the layers in between hand on: each of them is called without it, and returns it as it
came. So to everything else it is a tensor between two layers like any other: it crosses borders, is kept, sent and
computed again, and its gradient comes back, by the rules that are there already. The price: it is sent once at every
border on its way.

Rules: a name is handed by one layer, and taken by one or more later ones. What a layer hands are the last tensors that
it returns, behind its own; what it takes are the last that it is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from engine.core.errors import Problem, UserError, nearest
from engine.models.layers import LayerSpec, Model, Tensors, as_tensors


def with_skips(model: Model) -> Model:
    """Returns the model in which each layer passes on what is handed over it; raises UserError where names mismatch."""
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
    # Not a module around it: the names of its parameters stay, which ties and hashes go by.
    module.forward = partial(_pass_on, module.forward, layer, entering, leaving)
    return module


def _pass_on(
    forward: Callable[..., object], layer: LayerSpec, entering: Sequence[str], leaving: Sequence[str], *inputs: Tensor
) -> Tensors:
    """Calls a layer with its own inputs and what it takes; returns its own outputs and all that travels on."""
    num_own = len(inputs) - len(entering)
    travelling = dict(zip(entering, inputs[num_own:], strict=True))
    made = as_tensors(forward(*inputs[:num_own], *(travelling[name] for name in layer.takes)), layer.name)
    num_own = len(made) - len(layer.hands)
    if num_own < 1:
        expected = f"its own outputs and behind them {', '.join(layer.hands)}"
        raise TypeError(f"{layer.name}: expected {expected}, found {len(made)} tensors")
    travelling.update(zip(layer.hands, made[num_own:], strict=True))
    return (*made[:num_own], *(travelling[name] for name in leaving))


def _mismatches(layers: Sequence[LayerSpec]) -> Iterator[Problem]:
    handing = _by_name(layers, [layer.hands for layer in layers])
    taking = _by_name(layers, [layer.takes for layer in layers])
    for name, givers in handing.items():
        if len(givers) > 1:
            yield Problem("model", f"one layer that hands {name!r}", _told(layers, givers))
        if name not in taking:
            hint = nearest(name, taking.keys() - handing.keys())
            yield Problem(
                "model", f"a later layer that takes {name!r}", f"none; {_told(layers, givers)} hands it", hint
            )
    for name, takers in taking.items():
        if name not in handing:
            hint = nearest(name, handing)
            yield Problem(
                "model", f"an earlier layer that hands {name!r}", f"none; {_told(layers, takers)} takes it", hint
            )
        elif takers[0] <= handing[name][0]:
            found = f"{_told(layers, handing[name][:1])} hands it and {_told(layers, takers[:1])} takes it"
            yield Problem("model", f"{name!r} to be taken by a later layer than hands it", found)


def _by_name(layers: Sequence[LayerSpec], names: Sequence[tuple[str, ...]]) -> dict[str, list[int]]:
    """Returns the layers that list each name, as often as they do."""
    found: dict[str, list[int]] = {}
    for index, listed in enumerate(names):
        for name in listed:
            found.setdefault(name, []).append(index)
    return found


def _told(layers: Sequence[LayerSpec], indexes: Sequence[int]) -> str:
    return " and ".join(f"layer {index} ({layers[index].name})" for index in indexes)
