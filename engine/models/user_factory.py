"""A user's models and data, named ``package.module:factory``: trusted code that is imported and called.

Rules: the module is imported from `sys.path` as it is. An error of a factory becomes a UserError with the factory and
the exception. A process builds the layers of a model once, from one key, and copies them: the weights are the same in
every worker and every pipeline.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.core.config.job import Job
from engine.core.errors import Problem, UserError, nearest
from engine.core.random_key import random_key
from engine.core.scalar import Args
from engine.models.arguments import Factory, check_user_args
from engine.models.data import Data, DataFacts
from engine.models.layers import FunctionLayer, LayerSpec, Model, Tie
from engine.models.losses import default_loss
from engine.models.memory_rules import refuse_what_cannot_be_kept, shared_buffers
from engine.models.whole_batches import SplitBatches, WholeBatches


def user_model(job: Job) -> Model:
    """Returns the model of the factory `job.model`, called with `job.model_args`; raises UserError.

    The factory returns an nn.Sequential, a list or tuple of modules and callables, or a Model. Unless it is a Model, it
    gets the default loss, and a parameter that several layers share becomes a tie.
    """
    factory = _import_factory("model", job.model)
    check_user_args("model_args", factory, job.model_args)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_key(job.seed, "model"))
        made = _call("model", job.model, factory, job.model_args)
    if isinstance(made, Model):
        return made
    layers = list(_layers(job.model, made))
    if not layers:
        raise _wrong("model", job.model, "a factory that returns at least one layer")
    # With `partial`, only a worker that needs a layer copies it.
    specs = [
        LayerSpec(
            name,
            type(layer).__name__,
            partial(_copied, job.model, name, layer),
            _names(job.model, name, layer, "hands"),
            _names(job.model, name, layer, "takes"),
        )
        for name, layer in layers
    ]
    modules = [layer for _, layer in layers]
    refuse_what_cannot_be_kept(dict(enumerate(modules)))
    return Model(tuple(specs), default_loss, _shared(modules), shared_buffers=shared_buffers(modules))


def _copied(model: str, name: str, layer: nn.Module) -> nn.Module:
    """Returns a copy of a layer; raises UserError if copy.deepcopy fails."""
    try:
        return copy.deepcopy(layer)
    except Exception as error:
        hint = "such as torch.nn.utils.parametrizations.weight_norm in place of torch.nn.utils.weight_norm"
        found = f"{name!r} of {model!r}: {type(error).__name__}: {error}"
        raise UserError([Problem("model", "layers that copy.deepcopy can copy", found, hint)]) from error


def user_data(job: Job) -> Data:
    """Returns the data of the factory `job.data`, called with `job.data_args` and the job's seed; raises UserError."""
    factory = _import_factory("data", job.data)
    args: Args = {"seed": job.seed, **job.data_args}
    check_user_args("data_args", factory, args)
    made = _call("data", job.data, factory, args)
    if isinstance(made, Data) and isinstance(made.facts, DataFacts):
        return made
    if isinstance(made, WholeBatches) and isinstance(made.facts, DataFacts):
        split: Data = _call("data", job.data, partial(SplitBatches, made, job), {}, "whole batches that can be split")
        return split
    expected = (
        "a factory that returns an object with facts (DataFacts), microbatch() and validation(), "
        "or with facts, spec, batch() and validation_batch()"
    )
    raise _wrong("data", job.data, expected, f"it returned {type(made).__name__}")


def _wrong(field: str, name: str, expected: str, hint: str = "") -> UserError:
    return UserError([Problem(field, expected, repr(name), hint)])


def _import_factory(field: str, name: str) -> Factory:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise _wrong(field, name, "a factory that can be imported", _describe(error)) from error
    factory = getattr(module, attribute, None)
    if factory is None:
        raise _wrong(field, name, f"a factory in {module_name}", nearest(attribute, dir(module)))
    if not callable(factory):
        raise _wrong(field, name, "a factory that can be called", f"it is a {type(factory).__name__}")
    return factory


def _call(field: str, name: str, factory: Factory, args: Args, expected: str = "a factory that returns") -> Any:
    try:
        return factory(**args)
    except Exception as error:
        raise _wrong(field, name, expected, _describe(error)) from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _layers(factory_name: str, made: object) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, layer) with the names of a Sequential or else the index; a module listed twice comes twice."""
    if isinstance(made, nn.Sequential):
        parts: list[tuple[str, object]] = list(made._modules.items())
    elif isinstance(made, (list, tuple, nn.ModuleList)):
        parts = [(str(index), part) for index, part in enumerate(made)]
    else:
        expected = "a factory that returns an nn.Sequential, a list of layers or a Model"
        raise _wrong("model", factory_name, expected, f"it returned {type(made).__name__}")
    for part_name, part in parts:
        if isinstance(part, nn.Module):
            yield part_name, part
        elif callable(part) and not isinstance(part, type):
            yield part_name, FunctionLayer(part)
        else:
            found = f"layer {part_name} is {part if isinstance(part, type) else type(part)}"
            raise _wrong("model", factory_name, "layers that are modules or functions", found)


def _names(factory_name: str, layer_name: str, layer: nn.Module, attribute: str) -> tuple[str, ...]:
    """Returns the names of the skip connections that a layer hands or takes."""
    names = getattr(layer, attribute, ())
    if not (isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)):
        expected = f"a tuple of names as {attribute} of layer {layer_name}"
        raise _wrong("model", factory_name, expected, f"it is {names!r}")
    return tuple(names)


def _shared(layers: list[nn.Module]) -> tuple[Tie, ...]:
    """Returns a tie for each parameter that several layers share."""
    uses: dict[int, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            uses.setdefault(id(parameter), []).append((index, name))
    return tuple(Tie(tuple(places)) for places in uses.values() if len(places) > 1)
