"""Skip connections: named tensors that a layer hands to a later layer, past the layers in between.

    layer 0  returns (own, skip)
    layer 1  is called with (own), returns (own); the wrapper passes skip through
    layer 2  is called with (own, skip)

The tensor travels with the outputs of the layers in between, so that transfers, recovery and gradients need no rule for
it. The price is a transfer at every border on its way.

Rules: one layer hands a name, one or more later layers take it. The tensors that a layer hands are the last ones of its
outputs; those that it takes are its last arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from engine.core.errors import Problem, UserError, nearest
from engine.models.layers import LayerSpec, Model, Tensors, as_tensors


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
    """Returns for each name the layers that list it; a layer that lists it twice appears twice."""
    found: dict[str, list[int]] = {}
    for index, listed in enumerate(names):
        for name in listed:
            found.setdefault(name, []).append(index)
    return found


def _told(layers: Sequence[LayerSpec], indexes: Sequence[int]) -> str:
    return " and ".join(f"layer {index} ({layers[index].name})" for index in indexes)
