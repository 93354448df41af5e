"""A user's models and other parts, named ``package.module:factory``: trusted code that is imported and called.

Rules: the module is imported from the current folder, else from the rest of `sys.path`. The name of an `nn.Module`, or
of another object that is no function, stands for the object itself. An exception in the import or the factory names its
place (`engine.models.user_code`). A process builds the layers of a model once, from one key, and copies them: the
weights are the same in every worker and every pipeline.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.errors import Problem, UserError, nearest
from engine.core.job.job import Job
from engine.core.random_key import random_key
from engine.core.units import Args
from engine.models.arguments import Factory, check_user_args, takes
from engine.models.layers import Model, ModuleCopy, Tie, layer_spec, named_layers
from engine.models.losses import default_loss
from engine.models.memory_rules import refuse_what_cannot_be_kept, shared_buffers
from engine.models.user_code import IMPORT, running


def user_model(job: Job, ordinary: Callable[[nn.Module, object], Model] | None = None) -> Model:
    """Returns the model of the factory `job.model`, called with `job.model_args`; raises UserError.

    The factory returns an nn.Sequential, a list or tuple of modules and callables, a Model, or another module, which
    `ordinary` makes a model of; example inputs may stand beside it. The name may also be that of such an object. A list
    of layers gets the default loss, and inputs in the `form` of the data. A parameter that several layers share becomes
    a tie.
    """
    with torch.random.fork_rng(devices=[]):
        returned = made_by("model", job.model, job.model_args, random_key(job.seed, "model"))
    returned, inputs = _parted(returned)
    if ordinary and isinstance(returned, nn.Module) and not isinstance(returned, (nn.Sequential, nn.ModuleList)):
        return _completed(ordinary(returned, inputs))
    if inputs is not None:
        expected = "a module whose forward is recorded, beside example inputs"
        hint = "its layers are known: return it alone"
        raise wrong_factory("model", job.model, expected, f"it returned {type(returned).__name__} with inputs; {hint}")
    if job.split:
        split = f"{job.split!r} for {job.model}, which is a list of layers already"
        raise UserError([Problem("split", "no value", split, "each layer of a list stays whole")])
    model = returned if isinstance(returned, Model) else _model_of(job.model, returned)
    if not model.layers:
        raise wrong_factory("model", job.model, "a factory that returns at least one layer")
    return _completed(model)


def _parted(returned: object) -> tuple[object, object]:
    """Returns what a factory made, and the example inputs beside it or None: a tensor, a tuple or a mapping."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], (nn.Module, Model)):
        module, inputs = returned
        if isinstance(inputs, (Tensor, tuple, list, Mapping)) and not callable(inputs):
            return _uncompiled(module), inputs
    return _uncompiled(returned), None


def _uncompiled(module: object) -> object:
    """Returns the module that ``torch.compile(module)`` wraps: its calls would hide every operation."""
    while isinstance(module, nn.Module) and isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
        module = inner
    return module


def _model_of(factory_name: str, returned: object) -> Model:
    try:
        named = named_layers(returned)
    except TypeError:
        expected = "a factory that returns a module, a list of layers or a Model"
        raise wrong_factory("model", factory_name, expected, f"it returned {type(returned).__name__}") from None
    try:
        specs = tuple(layer_spec(name, layer) for name, layer in named)
    except TypeError as error:
        raise wrong_factory("model", factory_name, "layers that are modules or functions", str(error)) from None
    return Model(specs, default_loss)


def _completed(model: Model) -> Model:
    """Returns the model with the ties and the shared buffers of the layers that are modules already."""
    modules = {
        index: layer.build.module for index, layer in enumerate(model.layers) if isinstance(layer.build, ModuleCopy)
    }
    refuse_what_cannot_be_kept(modules)
    ties = tuple(tie for tie in _shared(modules) if tie not in model.ties)
    return replace(model, ties=(*model.ties, *ties), shared_buffers=(*model.shared_buffers, *shared_buffers(modules)))


def wrong_factory(field: str, name: str, expected: str, hint: str = "") -> UserError:
    """Returns the error about the factory `name` of a job's field."""
    return UserError([Problem(field, expected, repr(name), hint)])


def made_by(field: str, name: str, args: Args, key: int) -> Any:
    """Returns the result of the factory, or object, `name`, drawn from the key; raises UserError for bad arguments."""
    target = _import(field, name)
    if isinstance(target, (nn.Module, Model)) or not callable(target):
        if names := args.keys() - {"seed"}:
            hint = f"{name} is a {type(target).__name__}, no factory"
            raise UserError([Problem(f"{field}_args", "no arguments", ", ".join(sorted(names)), hint)])
        return target
    if field == "data" and not takes(target, "seed"):
        args = {name: value for name, value in args.items() if name != "seed"}
    check_user_args(f"{field}_args", target, args)
    torch.manual_seed(key)
    return called(name, target, args)


def import_factory(field: str, name: str) -> Factory:
    """Returns the function `package.module:attribute` that a job's field names; raises UserError if there is none."""
    target = _import(field, name)
    if not callable(target):
        raise wrong_factory(field, name, "a factory that can be called", f"it is a {type(target).__name__}")
    return target


def _import(field: str, name: str) -> Any:
    """Returns an attribute of a user's module; an import that draws random numbers draws the same in every worker."""
    module_name, _, attribute = name.partition(":")
    _look_in_this_folder()
    try:
        with running(f"{IMPORT} {module_name}"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(random_key(0, "import"))
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module was found, and one that it imports was not
        hint = f"{type(error).__name__}: {error}"
        raise wrong_factory(field, name, "a factory that can be imported", hint) from error
    target = getattr(module, attribute, None)
    if target is None:
        raise wrong_factory(field, name, f"a factory in {module_name}", nearest(attribute, dir(module)))
    if isinstance(target, (ModuleType, int, float, str, bytes)):
        raise wrong_factory(field, name, "a factory that can be called", f"it is a {type(target).__name__}")
    return target


def _look_in_this_folder() -> None:
    """Puts the current folder first in `sys.path`, as Python does; a worker begins without it (``python -P``)."""
    folder = os.getcwd()
    if sys.flags.safe_path and not os.environ.get("PYTHONSAFEPATH") and folder not in sys.path:
        sys.path.insert(0, folder)


def called(name: str, factory: Factory, args: Args) -> Any:
    """Returns the result of a factory; an exception in it names the factory."""
    with running(f"the factory {name}", factory):
        return factory(**args)


def _shared(layers: Mapping[int, nn.Module]) -> tuple[Tie, ...]:
    """Returns a tie for each parameter that several layers share."""
    uses: dict[int, list[tuple[int, str]]] = {}
    for index, layer in layers.items():
        for name, parameter in layer.named_parameters():
            uses.setdefault(id(parameter), []).append((index, name))
    return tuple(Tie(tuple(places)) for places in uses.values() if len(places) > 1)
