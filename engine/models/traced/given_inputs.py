"""Example inputs that a factory returns beside its module: the forward is recorded with them, in place of the data.

A tensor or a tuple is given by position, a mapping by name. They have the shapes and dtypes of the first microbatch,
because the record is made for these. Targets may be left out: they then come from the data.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from engine.core.errors import Problem, UserError
from engine.models.layers import Batch, Tensors
from engine.models.losses import shapes_of
from engine.models.pytree import flatten
from engine.models.traced.recorded import Example, bound

ByParameter = dict[str, Tensors]  # tensors by the parameter of the forward that takes them
_HINT = "dimension 0 is --microbatch-size; or return the module alone: it is then recorded with the first microbatch"


def with_given(module: nn.Module, example: Example, given: Any) -> Example:
    """Returns the example with the given inputs in the place of those of the data; raises UserError if they differ."""
    call = bound(module, example)
    theirs = _named(module, call.args, call.kwargs)
    args, kwargs = _as_call(given)
    ours = _named(module, args, kwargs)
    of_targets = {id(each) for each in call.targets} - {id(each) for each in call.inputs}
    needed = {name for name, tensors in theirs.items() if not all(id(each) in of_targets for each in tensors)}
    known = needed <= ours.keys() <= theirs.keys()
    names = dict.fromkeys([*theirs, *ours]) if not known else ours
    wanted, found = _told(theirs, names), _told(ours, names)
    if wanted != found:
        raise UserError([Problem("model", f"example inputs as the data: {wanted}", found, _HINT)])
    pairs = [zip(theirs[name], ours[name], strict=True) for name in ours]
    instead = {id(one): other.detach() for each in pairs for one, other in each}

    def replaced(tensors: Tensors, used: Tensors) -> Tensors:
        return tuple(instead.get(id(each), tensor) for each, tensor in zip(used, tensors, strict=True))

    batch, targets = example.batch, example.batch.targets
    count = len(call.targets)
    targets = (*replaced(targets[:count], call.targets), *targets[count:])
    return example._replace(batch=Batch(replaced(batch.inputs, call.inputs), targets))


def _as_call(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (given,) if isinstance(given, Tensor) else tuple(given), {}


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ByParameter:
    """Returns the tensors of a call of the forward by its parameters; raises UserError if it cannot be called so."""
    try:
        found = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        expected = "example inputs that the forward takes"
        raise UserError([Problem("model", expected, f"{type(error).__name__}: {error}")]) from None
    return {name: flatten(value)[1] for name, value in _spread(module, found) if value is not None}


def _spread(module: nn.Module, found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the arguments by name; each of those in ``**`` by its own."""
    parameters = inspect.signature(module.forward).parameters
    for name, value in found.items():
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def _told(named: ByParameter, names: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {shapes_of(named[name])}" for name in names if name in named) or "nothing"
