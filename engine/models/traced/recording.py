"""The record of one forward of a module: its operations in order, and where tensors come from.

A tensor of the record is a `TracedValue` (an input, a target, or the result of an operation), a `NamedState` (a
parameter or a buffer of the module), or a `HeldTensor`, which existed before the forward and is no part of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TracedValue:
    """A tensor that the forward was given or made, by its number in the order of time."""

    number: int


@dataclass(frozen=True, slots=True)
class NamedState:
    """A parameter or a buffer by its name in the module."""

    name: str
    is_buffer: bool

    @property
    def holder(self) -> str:
        """The path of the module that has it."""
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """Its name in that module."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A tensor that existed before the forward."""

    tensor: Tensor


TensorSource = TracedValue | NamedState | HeldTensor


class CodeLine(NamedTuple):
    """A line of the user's code."""

    file: str = ""
    number: int = 0
    function: str = ""


class Context(NamedTuple):
    """The modes of torch under which an operation runs."""

    has_gradients: bool
    is_autocast: bool
    dtype: torch.dtype  # of autocast


_TRAINING = Context(True, False, torch.bfloat16)


class LeafCall(NamedTuple):
    """The function of an operation that calls a whole submodule."""

    path: str


class BufferWrite(NamedTuple):
    """The function of an operation that gives a buffer another tensor."""

    place: NamedState


@dataclass(slots=True)
class TorchCall:
    """One call of a torch function.

    `args` and `kwargs` have a `TensorSource` in place of each tensor, `results` have a `TracedValue` in place of each
    new one and None for everything else. `written` are the memories that the call overwrites.
    """

    function: Callable[..., Any] | LeafCall | BufferWrite
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any
    line: CodeLine
    context: Context
    written: frozenset[int] = frozenset()
    draws: bool = False  # random numbers
    work: int = 0  # about the number of floating point operations
    leaf_places: tuple[NamedState, ...] = ()  # of a whole submodule

    def sources(self) -> Iterator[TensorSource]:
        """Yields every tensor that the call reads."""
        yield from sources_in((self.args, self.kwargs))
        yield from self.leaf_places
        if isinstance(self.function, BufferWrite):
            yield self.function.place

    def values(self) -> Iterator[TracedValue]:
        """Yields every tensor that the call makes."""
        for each in sources_in(self.results):
            if isinstance(each, TracedValue):
                yield each


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a submodule: the number of the first operation in it, and of the first one after it."""

    path: str
    count: int  # of the calls of this submodule before
    kind: str
    first: int
    last: int


@dataclass(slots=True)
class Trace:
    """The record of one forward; `memory` has the number of the memory in which each tensor lies."""

    inputs: tuple[TracedValue, ...] = ()
    targets: tuple[TracedValue, ...] = ()
    operations: list[TorchCall] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    outputs: tuple[TensorSource, ...] = ()
    is_loss: bool = False  # the output is the loss
    measured: tuple[TensorSource, ...] = ()  # beside the loss, for the metrics
    shapes: dict[TracedValue, tuple[torch.dtype, torch.Size]] = field(default_factory=dict)
    memory: dict[TracedValue | NamedState, int] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()  # buffers
    base: Context = _TRAINING


def sources_in(tree: Any) -> Iterator[TensorSource]:
    """Yields the sources in a tree of tuples, lists, dicts and slices, in order."""
    if isinstance(tree, (TracedValue, NamedState, HeldTensor)):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from sources_in(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from sources_in(each)
    elif isinstance(tree, slice):
        yield from sources_in((tree.start, tree.stop, tree.step))


def places_of(module: nn.Module) -> Iterator[tuple[NamedState, Tensor]]:
    """Yields each name of each parameter and buffer, in the order of the state_dict."""
    for path, each in module.named_modules(remove_duplicate=False):
        for is_buffer, tensors in ((False, each._parameters), (True, each._buffers)):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield NamedState(f"{path}.{key}".lstrip("."), is_buffer), tensor


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors in a tree of tuples, lists and dicts, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from tensors_in(each)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
