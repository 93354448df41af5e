"""Data sources of whole batches: all microbatches of one pipeline at once, split here by the spec of the source.

The first layer is called with the arguments in the form that the source returns: positional and named, nested, with
values other than tensors. Rules:
- The form and the other values are the same in every microbatch.
- A batch is a pure function of (step, pipeline), so that any worker can load it again. A worker of the first or the
  last stage loads the whole batch once per step.
- A batch has the requested size along every split dimension.
- A microbatch is a copy of its part, so that its memory layout, and with it the bits, do not depend on the batch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from engine.core.config.job import Job
from engine.models.chunks import Spec, split
from engine.models.data import Columns, DataFacts, Taken
from engine.models.layers import Batch, FunctionLayer, LayerSpec, Model
from engine.models.pytree import flatten, map_leaves, unflatten

_VALIDATION = -1  # used as the step of validation


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """The arguments of the first layer, and the targets, whose tensors the loss gets in order."""

    args: tuple[Any, ...]
    targets: Any
    kwargs: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class WholeBatches(Protocol):
    """A source of whole batches."""

    @property
    def facts(self) -> DataFacts:
        """The facts that a model needs about a microbatch."""

    @property
    def spec(self) -> Spec:
        """The split of a batch: None, or a WholeBatch with a spec in the place of each argument."""

    def batch(self, step: int, pipeline: int, size: int) -> WholeBatch:
        """Returns `size` training samples, for all microbatches of one pipeline."""

    def validation_batch(self, size: int) -> WholeBatch:
        """Returns `size` samples that training never sees, the same at each call."""


class SplitBatches:
    """A `Data` source of the microbatches of whole batches."""

    def __init__(self, source: WholeBatches, job: Job):
        self._source, self._job = source, job
        self._step = 0
        self._parts: dict[int, list[WholeBatch]] = {}  # of the step, by pipeline
        self._lock = threading.Lock()  # several threads may load ahead
        self._form, _ = _form(self._part(0, 0, 0, job.microbatch_size))
        self.facts = replace(source.facts, form=self._form)

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` training samples."""
        return self._batch(step, pipeline, microbatch, size)

    def validation(self, index: int, size: int) -> Batch:
        """Returns `size` samples that training never sees."""
        return self._batch(_VALIDATION, 0, index, size)

    def _batch(self, step: int, pipeline: int, index: int, size: int) -> Batch:
        part = map_leaves(_own, self._part(step, pipeline, index, size))
        form, inputs = _form(part)
        if form != self._form:
            raise ValueError(f"batch: expected arguments of the same form in every microbatch, found {form}")
        return Batch(inputs, flatten(part.targets)[1])

    def _part(self, step: int, pipeline: int, index: int, size: int) -> WholeBatch:
        with self._lock:
            if step != self._step:
                self._step, self._parts = step, {}
            if pipeline not in self._parts:
                self._parts[pipeline] = self._split(step, pipeline, size)
            return self._parts[pipeline][index]

    def _split(self, step: int, pipeline: int, size: int) -> list[WholeBatch]:
        """Returns the parts of a whole batch; an error names the call of the source."""
        source, name = self._source, type(self._source).__name__
        if step == _VALIDATION:
            count = self._job.validation_microbatches or Job().validation_microbatches
            whole: object = source.validation_batch(count * size)
            call = f"{name}.validation_batch(size={count * size})"
        else:
            count = self._job.microbatches
            whole = source.batch(step, pipeline, count * size)
            call = f"{name}.batch(step={step}, pipeline={pipeline}, size={count * size})"
        if not isinstance(whole, WholeBatch):
            raise TypeError(f"{call} returned {type(whole).__name__}, expected a WholeBatch")
        try:
            return split(whole, source.spec, count, count * size)
        except ValueError as error:
            raise ValueError(f"{call}: {error}") from error


def _form(part: WholeBatch) -> tuple[object, tuple[Tensor, ...]]:
    return flatten((part.args, part.kwargs))


def _own(leaf: Any) -> Any:
    """Returns a contiguous copy of a tensor: its place in memory can decide bits. Returns other leaves as they are."""
    return leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf


def with_form(model: Model, form: object) -> Model:
    """Returns the model with a first layer that puts its input tensors into the form of the data."""
    if form is None:
        return model
    first, *others = model.layers
    return replace(model, layers=(replace(first, build=partial(_build, first, form)), *others))


def _build(layer: LayerSpec, form: object) -> nn.Module:
    module = layer.build()
    forward = module.forward
    if isinstance(form, Columns):
        form = form.taken_by(module.function if isinstance(module, FunctionLayer) else forward)

    def call(*inputs: Tensor) -> object:
        args, kwargs = form.chosen(inputs) if isinstance(form, Taken) else unflatten(form, inputs)
        return forward(*args, **kwargs)

    module.forward = call
    return module
