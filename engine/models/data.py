"""The interface of a data source: facts about its samples, and microbatches by number.

Rule: a microbatch is a pure function of (seed, step, pipeline, microbatch), and a validation microbatch of its index
alone. Any worker can therefore load any of them, repeatedly and in any order. All tensors are on the CPU. The first
input and the first target have `size` rows; shapes and dtypes are the same in each microbatch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from engine.core.errors import Problem, UserError
from engine.core.random_key import random_key
from engine.models.layers import Batch, Tensors

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
    form: object = None  # of the first layer's arguments if they are a tree (engine.models.pytree)

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown task."""
        if self.task not in get_args(Task):
            raise ValueError(f"DataFacts: expected one of {', '.join(get_args(Task))} as task, found {self.task!r}")


class Taken(NamedTuple):
    """The inputs that a function takes, as numbers: by position, and by name."""

    positions: tuple[int, ...]
    names: Mapping[str, int]

    def chosen(self, inputs: Tensors) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Returns the positional and the named arguments of the function."""
        return tuple(inputs[each] for each in self.positions), {name: inputs[at] for name, at in self.names.items()}


class Columns(NamedTuple):
    """A form of inputs with names, one of which may be the target."""

    names: tuple[str, ...]
    target: str

    def taken_by(self, function: Callable[..., object], targets: Container[str] = ()) -> Taken:
        """Returns the inputs that a function takes; `targets` are parameters that get the targets.

        It takes those that it has a parameter for, the target too; with ``**`` all others by name. A function that
        names none of them takes the only one by position, or all with ``*``. Raises UserError if it cannot be called.
        """
        at = {name: index for index, name in enumerate(self.names)}
        others = [name for name in self.names if name != self.target]
        parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in targets]
        kinds = {each.kind for each in parameters}
        named = {each.name: at[each.name] for each in parameters if each.name in at}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return Taken((), {name: at[name] for name in others} | named)
        if not named and (len(others) == 1 or inspect.Parameter.VAR_POSITIONAL in kinds):
            return Taken(tuple(at[name] for name in others), {})
        is_lacking = any(each.default is each.empty and each.name not in named for each in parameters)
        if is_lacking or not named:
            wanted = ", ".join(each.name for each in parameters)
            expected = f"columns that the first layer takes ({wanted})"
            raise UserError([Problem("data", expected, ", ".join(self.names), "a collate function can name them")])
        return Taken((), named)


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
