"""The record of one forward of a module: its operations in order, and where tensors come from.

A tensor of the record is a `TracedValue` (an input, a target, or the result of an operation), a `NamedState` (a
parameter or a buffer of the module), or a `HeldTensor`, which existed before the forward and is no part of the module.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.core.errors import Problem, UserError
from engine.models.user_code import is_own, shown


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
        """Returns every tensor that the call makes."""
        return (source for source in sources_in(self.results) if isinstance(source, TracedValue))


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
    asking: list[CodeLine] = field(default_factory=list)  # lines that have heard of a tracer
    has_other_bits: bool = False  # than the forward has alone
    as_inputs: dict[TracedValue, TracedValue] = field(default_factory=dict)  # target -> the input of the same column


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


def replaced_in(tree: Any, instead: Mapping[TracedValue, TracedValue]) -> Any:
    """Returns a tree as `sources_in` takes it, with other values in the place of some."""
    if isinstance(tree, TracedValue):
        return instead.get(tree, tree)
    if isinstance(tree, (tuple, list)):
        parts = [replaced_in(each, instead) for each in tree]
        return tree._make(parts) if hasattr(tree, "_make") else type(tree)(parts)
    if isinstance(tree, dict):
        return {key: replaced_in(each, instead) for key, each in tree.items()}
    if isinstance(tree, slice):
        return slice(*(replaced_in(each, instead) for each in (tree.start, tree.stop, tree.step)))
    return tree


def places_of(module: nn.Module) -> Iterator[tuple[NamedState, Tensor]]:
    """Yields each name of each parameter and buffer, in the order of the state_dict."""
    for path, submodule in module.named_modules(remove_duplicate=False):
        for is_buffer, tensors in ((False, submodule._parameters), (True, submodule._buffers)):
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


# What cannot be recorded, in words: the line of the user's code, and the ways out.
SUBMODULE = "put the line into a submodule, which then runs as it is, or return a list of layers or a Model"
REGISTER = "make the tensor once, in the constructor, and register it as a buffer"
DRAW = (
    "draw from torch's default generator, in each forward, and choose with torch.where: a dropped layer is "
    "`y = layer(x)` with `x = torch.where(torch.rand(()) < p, x, y)`, or a submodule that draws, branches and calls it"
)
_BRANCH = (
    "the way of the forward may not depend on values: compute both ways and choose with torch.where, put the line into "
    "a submodule, which then runs as it is, or return an nn.Sequential, a list of layers or a Model"
)
_ASSERTION = (
    "leave the assertion out, as a loss that is not finite ends the run by itself, or put it with the layer that it "
    "checks into a submodule, which then runs as it is"
)
_NUMBER = (
    "leave it out if it is for a log: the run reports losses, and --metrics in validations. Keep it a tensor in "
    "arithmetic, choose with torch.where in place of a branch, or put the line into a submodule, which runs as it is"
)
_NUMBERS = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__array__"})
_EXPECTED = "a module whose forward does the same torch operations for every microbatch"


class UnrecordableError(Exception):
    """A line of submodule `path` cannot be recorded; with `is_checkable` it reads a value to compare instead."""

    def __init__(self, words: str, hint: str, line: CodeLine, path: str):
        super().__init__(words)
        self.words, self.hint, self.line, self.path = words, hint, line, path
        self.is_checkable = False


def refused(error: UnrecordableError) -> UserError:
    """Returns the user's mistake with its line."""
    return UserError([Problem("model", _EXPECTED, f"{told(error.line)}{error.words}", error.hint)])


def way_out(name: str, line: CodeLine) -> str:
    """Returns what to do about a line that takes a value out of a tensor by the function `name` of torch."""
    if _text_of(line).startswith("assert "):
        return _ASSERTION
    return _NUMBER if name in _NUMBERS else _BRANCH


def told(line: CodeLine) -> str:
    """Returns a line of code as the beginning of a message, empty if it is not known."""
    if not line.file:
        return ""
    text = _text_of(line)
    return f"{shown(line.file)}:{line.number}, in {line.function}: {f'`{text}`: ' if text else ''}"


def _text_of(line: CodeLine) -> str:
    return linecache.getline(line.file, line.number).strip()


def own_line(but: Collection[str] = ()) -> CodeLine:
    """Returns the innermost running line of the user's code, or of a package; lines of the files `but` do not count."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename in but or not is_own(frame.f_code.co_filename)):
        frame = frame.f_back
    return CodeLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else CodeLine()


# Finds the plain attributes of a module that carry something from one forward to the next: a record would freeze them.
#
# An attribute that each forward sets anew, such as the last activations or a mask that is made once, does no harm: a
# second forward then leaves it as the first one did, and returns the same. A counter or a growing list does not.

Attribute = tuple[str, str]  # (path of the module, name)

_OF_TORCH = frozenset(vars(nn.Module()))
_CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, nn.Module)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_CHANGES = (
    r"(?:[ \t]*(?:[-+*/%&|^@]|//|\*\*|<<|>>)?=(?!=)|\[|\.(?:append|extend|add|update|insert|pop|clear|remove)\w*\()"
)


def attributes_of(module: nn.Module) -> dict[Attribute, str]:
    """Returns a text of each plain attribute of a module and its submodules."""
    return {
        (path, name): _text(value, set())
        for path, submodule in module.named_modules()
        for name, value in vars(submodule).items()
        if name not in _OF_TORCH
    }


def difference(
    one: Mapping[Attribute, str], other: Mapping[Attribute, str], leaves: Collection[str]
) -> list[Attribute]:
    """Returns the attributes that differ, those of outer modules first, without those of submodules in `leaves`."""
    different = (each for each in {**one, **other} if one.get(each) != other.get(each))
    outside = (each for each in different if not any(f"{each[0]}.".startswith(f"{leaf}.") for leaf in leaves))
    return sorted(outside, key=lambda attribute: attribute[0].count(".") + bool(attribute[0]))


def text_of(tensors: tuple[Tensor, ...]) -> str:
    """Returns a text that is equal for tensors with equal bits."""
    return _text(tensors, set())


def carried(module: nn.Module, attribute: Attribute) -> UnrecordableError:
    """Returns the error about an attribute that a forward changes."""
    path, name = attribute
    words = f"the forward changes {'.'.join(filter(None, attribute))!r}, which later forwards find; no record keeps it"
    hint = (
        "register it as a buffer (a tensor, which takes part in checkpoints and recoveries), leave it out, or put it "
        "with the line into a submodule, which then runs as it is"
    )
    return UnrecordableError(words, hint, _line_of(module.get_submodule(path), name), path)


def _text(value: object, ids: Set[int]) -> str:
    if isinstance(value, Tensor):
        return _text_of_tensor(value)
    if isinstance(value, _CODE) or id(value) in ids:
        return ""
    ids = {*ids, id(value)}
    if isinstance(value, Mapping):
        return ",".join(f"{_text(key, ids)}:{_text(each, ids)}" for key, each in value.items())
    if isinstance(value, (list, tuple, Set)):
        return f"[{','.join(_text(each, ids) for each in value)}]"
    if isinstance(raw := getattr(value, "tobytes", None), BuiltinFunctionType):
        return _hash_of(raw())
    own: Any = getattr(value, "__dict__", None)
    return _ADDRESS.sub("", repr(value)) if own is None else _text(own, ids)


def _text_of_tensor(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return repr(tensor)
    bits = ""
    if not isinstance(tensor, nn.Parameter):  # which the recorder watches
        bits = _hash_of(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy())
    return f"{tensor.dtype}{list(tensor.shape)}{bits}"


def _hash_of(data: Any) -> str:
    return hashlib.blake2b(data).hexdigest()


def _line_of(module: nn.Module, name: str) -> CodeLine:
    """Returns the first line of the methods of a module that changes an attribute, those of its constructor last."""
    change = re.compile(rf"\.{re.escape(name)}{_CHANGES}")
    methods = [
        method
        for kind in type(module).__mro__
        for method in vars(kind).values()
        if isinstance(method, FunctionType) and is_own(method.__code__.co_filename)
    ]
    for method in sorted(methods, key=lambda method: (method.__name__ == "__init__", method.__name__ != "forward")):
        try:
            lines, first = inspect.getsourcelines(method)
        except (OSError, TypeError):
            continue
        for number, line in enumerate(lines, first):
            if change.search(line):
                return CodeLine(method.__code__.co_filename, number, method.__name__)
    return CodeLine()
