"""A user's models and data, named ``package.module:factory``: trusted code that is imported and called.

Rules: the module is imported from the current folder, else from the rest of `sys.path`. An exception in the import, the
factory or the data names its place (`engine.models.user_code`). A process builds the layers of a model once, from one
key, and copies them: the weights are the same in every worker and every pipeline.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine.core.config.job import Job
from engine.core.errors import Problem, UserError, nearest
from engine.core.random_key import random_key
from engine.core.scalar import Args
from engine.core.texts import counted
from engine.models.arguments import Factory, check_user_args
from engine.models.data import Data, DataFacts
from engine.models.indexed import bound, num_samples
from engine.models.layers import Batch, Model, ModuleCopy, Tensors, Tie, layer_spec, named_layers
from engine.models.losses import default_loss, shapes_of
from engine.models.memory_rules import refuse_what_cannot_be_kept, shared_buffers
from engine.models.user_code import running
from engine.models.whole_batches import SplitBatches, WholeBatches


def user_model(job: Job) -> Model:
    """Returns the model of the factory `job.model`, called with `job.model_args`; raises UserError.

    The factory returns an nn.Sequential, a list or tuple of modules and callables, or a Model. Unless it is a Model, it
    gets the default loss. A parameter that several layers share becomes a tie.
    """
    factory = _import_factory("model", job.model)
    check_user_args("model_args", factory, job.model_args)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_key(job.seed, "model"))
        made = _call(job.model, factory, job.model_args)
    model = made if isinstance(made, Model) else _model_of(job.model, made)
    if not model.layers:
        raise _wrong("model", job.model, "a factory that returns at least one layer")
    return _completed(model)


def _model_of(factory_name: str, made: object) -> Model:
    """Returns the model of a Sequential or a list of layers."""
    try:
        named = named_layers(made)
    except TypeError:
        expected = "a factory that returns an nn.Sequential, a list of layers or a Model"
        raise _wrong("model", factory_name, expected, f"it returned {type(made).__name__}") from None
    try:
        specs = tuple(layer_spec(name, layer) for name, layer in named)
    except TypeError as error:
        raise _wrong("model", factory_name, "layers that are modules or functions", str(error)) from None
    return Model(specs, default_loss)


def _completed(model: Model) -> Model:
    """Returns the model with the ties and the shared buffers of the layers that are modules already."""
    modules = {
        index: layer.build.module for index, layer in enumerate(model.layers) if isinstance(layer.build, ModuleCopy)
    }
    refuse_what_cannot_be_kept(modules)
    ties = tuple(tie for tie in _shared(modules) if tie not in model.ties)
    return replace(model, ties=(*model.ties, *ties), shared_buffers=(*model.shared_buffers, *shared_buffers(modules)))


def user_data(job: Job) -> Data:
    """Returns the data of the factory `job.data`, called with `job.data_args` and the job's seed; raises UserError."""
    factory = _import_factory("data", job.data)
    args: Args = {"seed": job.seed, **job.data_args}
    check_user_args("data_args", factory, args)
    made = bound(_call(job.data, factory, args), job)
    if isinstance(made, Data) and isinstance(made.facts, DataFacts):
        return OwnData(made)
    if isinstance(made, WholeBatches) and isinstance(made.facts, DataFacts):
        with running("the data", type(made).batch):
            return OwnData(SplitBatches(made, job))
    expected = (
        "a factory that returns an object with facts (DataFacts), microbatch() and validation(), "
        "or with facts, spec, batch() and validation_batch()"
    )
    raise _wrong("data", job.data, expected, f"it returned {type(made).__name__}{_lacks(made)}")


def _lacks(made: object) -> str:
    """Returns what an object lacks to be a data source, as words that follow its type."""
    if not isinstance(getattr(made, "facts", None), DataFacts):
        found = f", whose facts are a {type(made.facts).__name__}" if hasattr(made, "facts") else " without facts"
        return f"{found}: facts = DataFacts(task=...)"
    wanted = ("spec", "batch", "validation_batch") if hasattr(made, "batch") else ("microbatch", "validation")
    missing = [name if name == "spec" else f"{name}()" for name in wanted if not hasattr(made, name)]
    return f" without {' and '.join(missing)}" if missing else ""


class OwnData:
    """A user's data source; an exception in it, or a microbatch of another size or shape, names the data."""

    def __init__(self, source: Data):
        self.facts = source.facts
        self.num_samples = num_samples(source)
        self._source = source
        self._kinds: dict[tuple[str, int], str] = {}  # the dtypes and shapes of the first batch

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` training samples; raises TypeError if it is no Batch, ValueError for wrong rows or shapes."""
        with running("the data", self._source.microbatch):
            batch = self._source.microbatch(step, pipeline, microbatch, size)
            return self._checked(batch, f"microbatch({step=}, {pipeline=}, {microbatch=}, {size=})", size)

    def validation(self, index: int, size: int) -> Batch:
        """Returns `size` samples that training never sees; raises as `microbatch` does."""
        with running("the data", self._source.validation):
            return self._checked(self._source.validation(index, size), f"validation({index=}, {size=})", size)

    def _checked(self, batch: object, call: str, size: int) -> Batch:
        name = f"{type(self._source).__name__}.{call}"
        if not isinstance(batch, Batch):
            hint = "return Batch(inputs=(x,), targets=(y,))"
            raise TypeError(f"{name}: expected a Batch, found {type(batch).__name__}: {hint}")
        # The split of a whole batch has checked the rows, which need not be the first dimension.
        for part, tensors in () if isinstance(self._source, SplitBatches) else _parts(batch):
            rows = tensors[0].shape[0] if tensors and tensors[0].dim() else size
            if rows != size:
                raise ValueError(f"{name} returned {counted(rows, 'row')} in {part}[0], {size} were asked for")
        for part, tensors in _parts(batch):
            found = shapes_of(tensors)
            # The inputs of a validation are those of training, its targets may be others.
            key = part if part == "inputs" else f"{part} of {call.partition('(')[0]}"
            if (first := self._kinds.setdefault((key, size), found)) != found:
                raise ValueError(f"{name} returned {found} as {part}, the first were {first}")
        return batch


def _parts(batch: Batch) -> tuple[tuple[str, Tensors], ...]:
    return ("inputs", batch.inputs), ("targets", batch.targets)


def _wrong(field: str, name: str, expected: str, hint: str = "") -> UserError:
    return UserError([Problem(field, expected, repr(name), hint)])


def _import_factory(field: str, name: str) -> Factory:
    module_name, _, attribute = name.partition(":")
    _look_in_this_folder()
    try:
        with running(f"the import of {module_name}"):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module was found, and one that it imports was not
        raise _wrong(field, name, "a factory that can be imported", f"{type(error).__name__}: {error}") from error
    factory = getattr(module, attribute, None)
    if factory is None:
        raise _wrong(field, name, f"a factory in {module_name}", nearest(attribute, dir(module)))
    if not callable(factory):
        raise _wrong(field, name, "a factory that can be called", f"it is a {type(factory).__name__}")
    return factory


def _look_in_this_folder() -> None:
    """Puts the current folder first in `sys.path`, as Python does; a worker begins without it (``python -P``)."""
    folder = os.getcwd()
    if sys.flags.safe_path and not os.environ.get("PYTHONSAFEPATH") and folder not in sys.path:
        sys.path.insert(0, folder)


def _call(name: str, factory: Factory, args: Args) -> Any:
    with running(f"the factory {name}", factory):
        return factory(**args)


def _shared(layers: Mapping[int, nn.Module]) -> tuple[Tie, ...]:
    """Returns a tie for each parameter that several layers share."""
    uses: dict[int, list[tuple[int, str]]] = {}
    for index, layer in layers.items():
        for name, parameter in layer.named_parameters():
            uses.setdefault(id(parameter), []).append((index, name))
    return tuple(Tie(tuple(places)) for places in uses.values() if len(places) > 1)
