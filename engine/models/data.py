"""The interface of a data source: facts about its samples, and microbatches by number.

Rule: a microbatch is a pure function of (seed, step, pipeline, microbatch), and a validation microbatch of its index
alone. Any worker can therefore load any of them, repeatedly and in any order. All tensors are on the CPU. The first
input and the first target have `size` rows; shapes and dtypes are the same in each microbatch.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from engine.core.errors import Problem, UserError
from engine.core.job.job import Job
from engine.core.random_key import random_key
from engine.models.layers import (
    Batch,
    FunctionLayer,
    LayerSpec,
    Model,
    Tensors,
    flatten,
    map_leaves,
    parts_of,
    unflatten,
    with_parts,
)

Task = Literal["causal", "masked", "classify", "regress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """The facts that a model needs to fit the data; a size that the task does not use is 0.

    causal, masked: inputs and targets are int64 [size, sequence], below `vocabulary`. classify: inputs are float32
    [size, channels, height, width] or [size, features], targets int64 [size], below `num_classes`. regress: inputs are
    float32 [size, features], targets float32 [size, outputs].
    """

    task: Task
    vocabulary: int = 0
    sequence: int = 0
    num_classes: int = 0
    channels: int = 0
    height: int = 0
    width: int = 0
    features: int = 0
    outputs: int = 0
    form: object = None  # of the first layer's arguments if they are a tree (engine.models.layers)

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown task."""
        if self.task not in get_args(Task):
            raise ValueError(f"DataFacts: expected one of {', '.join(get_args(Task))} as task, found {self.task!r}")


_HOW = "a collate function can name them; a single parameter called batch gets all of them as one dict"
_DICTS = ("dict", "mapping", "batchencoding")  # in the annotation of a parameter that takes all columns


class ColumnDict(dict[str, Tensor]):
    """The columns of a microbatch by name; ``batch.labels`` is ``batch["labels"]``, as in transformers."""

    def __getattr__(self, name: str) -> Tensor:
        """Returns a column; raises AttributeError for another name."""
        if name not in self:
            raise AttributeError(f"no column {name!r} among {', '.join(self)}")
        return self[name]


class InputSelection(NamedTuple):
    """The inputs that a function takes, as numbers: by position, by name, or as one dict of all."""

    positions: tuple[int, ...]
    names: Mapping[str, int]
    is_dict: bool = False

    def chosen(self, inputs: Tensors) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
        """Returns the positional and the named arguments of the function."""
        named = {name: inputs[at] for name, at in self.names.items()}
        if self.is_dict:
            return (ColumnDict(named),), {}
        return tuple(inputs[each] for each in self.positions), named


class Columns(NamedTuple):
    """A form of inputs with names, one of which may be the target."""

    names: tuple[str, ...]
    target: str

    def taken_by(self, function: Callable[..., object], targets: Container[str] = ()) -> InputSelection:
        """Returns the inputs that a function takes; `targets` are parameters that get the targets.

        It takes those that it has a parameter for, the target too; with ``**`` all others by name. A function that
        names none of them takes the only one by position, or all with ``*``. A single parameter called batch, or
        annotated as a dict, takes all as one dict, the target too. Raises UserError if the function cannot be called.
        """
        at = {name: index for index, name in enumerate(self.names)}
        others = [name for name in self.names if name != self.target]
        parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in targets]
        kinds = {each.kind for each in parameters}
        named = {each.name: at[each.name] for each in parameters if each.name in at}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return InputSelection((), {name: at[name] for name in others} | named)
        if not named and len(parameters) == 1 and _takes_dict(parameters[0]):
            return InputSelection((), at, is_dict=True)
        if not named and (len(others) == 1 or inspect.Parameter.VAR_POSITIONAL in kinds):
            return InputSelection(tuple(at[name] for name in others), {})
        is_lacking = any(each.default is each.empty and each.name not in named for each in parameters)
        if is_lacking or not named:
            names = ", ".join(each.name for each in parameters)
            expected = f"columns that the first layer takes ({names})"
            raise UserError([Problem("data", expected, ", ".join(self.names), _HOW)])
        return InputSelection((), named)


def _takes_dict(parameter: inspect.Parameter) -> bool:
    """Returns whether a parameter is to get all columns: by its name, or by its annotation."""
    is_positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    annotation = str(parameter.annotation).lower()
    return is_positional and (parameter.name == "batch" or any(each in annotation for each in _DICTS))


@runtime_checkable
class Data(Protocol):
    """A source of microbatches."""

    @property
    def facts(self) -> DataFacts:
        """The facts that a model needs."""

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` training samples."""

    def validation(self, index: int, size: int) -> Batch:
        """Returns `size` samples that training never sees; `index` is 0, 1, 2, ... without limit."""


def keyed_generator(seed: int, *parts: int | str) -> torch.Generator:
    """Returns a fresh CPU generator seeded with the key of these parts."""
    return torch.Generator().manual_seed(random_key(seed, *parts))


def training_generator(seed: int, step: int, pipeline: int, microbatch: int) -> torch.Generator:
    """Returns the generator for all random draws of one training microbatch."""
    return keyed_generator(seed, "data", step, pipeline, microbatch)


# A finite data set as a pure source: `indexed` takes any map-style data set, with ``__len__`` and ``__getitem__``.
#
#     from engine.models.data import indexed
#
#     def mine(seed):
#         return indexed(training, {"validation": held_out, "test": other}, seed=seed)
#
# Every sample is trained once in every pass over the training set, in an order that depends on the seed and the pass
# (`engine.core.job.samples`). No order is kept in memory, so a run can continue at any step.


class MapStyle(Protocol):
    """A data set whose samples have numbers from 0 on, such as a torch.utils.data.Dataset."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, number: int, /) -> Any:
        """Returns one sample."""


Collate = Callable[[list[Any]], Any]
ONLY = "validation"  # the name of the evaluation set of a source that has one


@dataclass(frozen=True, slots=True)
class DataSets:
    """The data sets of `indexed`, before the job is known; a field that is None comes from the job or from a sample."""

    training: MapStyle
    evaluations: Mapping[str, MapStyle]
    facts: DataFacts | None
    seed: int | None
    collate: Collate | None
    draws: bool


def indexed(
    training: MapStyle,
    validation: MapStyle | Mapping[str, MapStyle] | None = None,
    facts: DataFacts | None = None,
    *,
    seed: int | None = None,
    collate: Collate | None = None,
    draws: bool = False,
) -> DataSets:
    """Makes a source of microbatches from a data set to train on, and sets by name that training never sees.

    A sample is a pair of inputs and targets, each a tensor, a number or a sequence of them; or a mapping of columns.
    `collate` makes a microbatch of a list of samples: such a pair or mapping, or a Batch. `facts` are read off the
    first microbatch, and `seed` is the job's, unless they are given. With `draws`, reading a training sample may draw
    from the random streams of the process (torch's, Python's and numpy's), as augmentations do: each sample of each
    pass has a key. Raises UserError if a data set is empty.
    """
    named = {} if validation is None else validation if isinstance(validation, Mapping) else {ONLY: validation}
    for name, samples in {"training": training, **named}.items():
        if not len(samples):
            raise UserError([Problem("data", f"at least one sample in the {name} set", "an empty one")])
    return DataSets(training, dict(named), facts, seed, collate, draws)


# Splits a tree of arguments into equal microbatches.
#
# A spec says how to treat each leaf. It is a mark, which applies to all leaves below it; or a tree with the same keys
# as the value and a spec for each part; or None, the default: tensors are split along dimension 0, other leaves are
# replicated. Rule: parts have equal sizes, because the loss of a step is the mean over its microbatches.


@dataclass(frozen=True, slots=True)
class Chunk:
    """A mark: tensors are split along dimension `dim`; other leaves are replicated."""

    dim: int = 0


class Mark(Enum):
    """The other mark."""

    REPLICATE = "replicate"  # every microbatch gets the whole leaf


Spec = Any  # Chunk | Mark | None | a tree of specs


def split(tree: Any, spec: Spec, count: int, length: int | None = None) -> list[Any]:
    """Returns the part of each of `count` microbatches of a tree, as views; raises ValueError with a bad leaf."""
    return _split(tree, spec, count, length, "batch")


def _split(value: Any, spec: Spec, count: int, length: int | None, where: str) -> list[Any]:
    parts = parts_of(value)
    if parts is not None:
        specs = _specs(parts, spec, where)
        columns = [_split(part, specs[key], count, length, f"{where}.{key}") for key, part in parts.items()]
        return [with_parts(value, [column[index] for column in columns]) for index in range(count)]
    mark = _mark(value, spec, where)
    if isinstance(mark, Mark):
        return [value] * count
    if not -value.dim() <= mark.dim < value.dim():
        raise ValueError(f"{where}: expected a tensor with a dimension {mark.dim}, found shape {list(value.shape)}")
    size = value.shape[mark.dim]
    if length not in (None, size):
        raise ValueError(f"{where}: expected {length} along dimension {mark.dim}, found {size}")
    if size % count or not size:
        raise ValueError(f"{where}: expected a multiple of {count} along dimension {mark.dim}, found {size}")
    return list(value.split(size // count, mark.dim))


def _specs(parts: dict[Any, Any], spec: Spec, where: str) -> dict[Any, Spec]:
    if spec is None or isinstance(spec, (Chunk, Mark)):
        return dict.fromkeys(parts, spec)
    specs = parts_of(spec)
    if specs is None or specs.keys() != parts.keys():
        expected = ", ".join(map(str, parts)) or "nothing"
        raise ValueError(f"{where}: expected a spec for {expected}, found {spec!r}")
    return specs


def _mark(leaf: Any, spec: Spec, where: str) -> Chunk | Mark:
    if not isinstance(leaf, (Tensor, int, float)):
        return Mark.REPLICATE
    if spec is None:
        return Chunk() if isinstance(leaf, Tensor) and leaf.dim() else Mark.REPLICATE
    if not isinstance(spec, (Chunk, Mark)):
        raise ValueError(f"{where}: expected a mark such as Chunk(0), found {spec!r}")
    return Mark.REPLICATE if isinstance(spec, Chunk) and not isinstance(leaf, Tensor) else spec


# Data sources of whole batches: all microbatches of one pipeline at once, split here by the spec of the source.
#
# The first layer is called with the arguments in the form that the source returns: positional and named, nested, with
# values other than tensors. Rules:
# - The form and the other values are the same in every microbatch.
# - A batch is a pure function of (step, pipeline), so that any worker can load it again. A worker of the first or the
#   last stage loads the whole batch once per step.
# - A batch has the requested size along every split dimension.
# - A microbatch is a copy of its part, so that its memory layout, and with it the bits, do not depend on the batch.

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
        part = self._part(0, 0, 0, job.microbatch_size)
        self._form, _ = flatten((part.args, part.kwargs))
        self.facts = replace(source.facts, form=self._form)

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` training samples."""
        return self._batch(step, pipeline, microbatch, size)

    def validation(self, index: int, size: int) -> Batch:
        """Returns `size` samples that training never sees."""
        return self._batch(_VALIDATION, 0, index, size)

    def _batch(self, step: int, pipeline: int, index: int, size: int) -> Batch:
        part = map_leaves(_own, self._part(step, pipeline, index, size))
        form, inputs = flatten((part.args, part.kwargs))
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
        args, kwargs = form.chosen(inputs) if isinstance(form, InputSelection) else unflatten(form, inputs)
        return forward(*args, **kwargs)

    module.forward = call
    return module
