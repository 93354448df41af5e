"""Values that a forward reads out of tensors, as in ``if mask.all():``: a record takes one way.

Sizes that depend on values, such as that of ``x[mask]``, are such values. Three answers, in this order:

1. Code that asks whether a tensor is a tracer's (`torch.fx.Proxy`) hears yes for a tensor that depends on the
   microbatch or on weights, and takes the way that reads nothing. It hears no to the general questions, such as
   ``torch.jit.is_tracing()``: many modules compute something else then, such as an interpolation of positions.
2. A submodule without blocks inside stays whole, and reads its values in every microbatch.
3. Any other one is opened: the read becomes a `ValueCheck`, which reads again in every microbatch and ends the run when
   the value differs. It stays whole after all if the value differs in some of the first microbatches.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor

from engine.models.layers import map_leaves
from engine.models.traced.recording import CodeLine, LeafCall, Trace, UnrecordableError, told

_PLAIN = (bool, int, float)
_MASKS = (torch.bool, torch.uint8)
_SIZED_BY_FIRST = frozenset(
    """
    index_add index_copy index_fill index_put masked_fill masked_scatter scatter scatter_add scatter_reduce copy
    __setitem
    """.split()
)
_SIZED_BY_ARGUMENT = frozenset(
    """
    arange range linspace logspace eye zeros ones empty full rand randn randint randperm __getitem__ narrow expand view
    reshape repeat tile pad unfold new_zeros new_ones new_empty new_full
    """.split()
)
_CHECKS = frozenset({"_check_with", "_check_tensor_all_with"})  # of torch: they raise unless a value is true
_ALIKE = 3  # numbers of like submodules that a note names


class OtherValueError(RuntimeError):
    """A line has read another value in this microbatch than when the forward was recorded."""


class ValueCheck:
    """The function of an operation that reads a value again, and raises OtherValueError unless it is as recorded."""

    def __init__(self, read: Callable[..., Any], value: Any, line: CodeLine):
        self._read, self.value, self.line = read, value, line

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Compares the value with that of the record."""
        value = self._read(*args, **kwargs)
        if value != self.value:
            hint = "put the line into a submodule of its own without blocks inside, or choose with torch.where"
            raise OtherValueError(f"the line has read {self.value!r} in the record, and {value!r} here: {hint}")


def is_checkable(value: object) -> bool:
    """Returns whether a value can be compared with that of another microbatch: numbers, and lists of them."""
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(map(is_checkable, value)))


def has_numbers(tree: object) -> bool:
    """Returns whether a number is in a tree of values."""
    numbers: list[object] = []
    map_leaves(numbers.append, tree)
    return any(isinstance(each, _PLAIN) for each in numbers)


def has_sizes_by_value(function: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether the sizes of the result of an operation of torch depend on values, as those of nonzero."""
    if torch.Tag.dynamic_output_shape not in function.tags:
        return False
    if function.overloadpacket is torch.ops.aten.index:  # by numbers or by a mask
        return any(each is not None and each.dtype in _MASKS for each in args[1])
    return True


def is_sized_by_argument(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a function of torch that reads a value makes sizes of it, as ``arange(length)`` does."""
    if name == "one_hot":  # it reads values to check them, and makes sizes of them if it is not given the number
        return (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1
    return name in _SIZED_BY_ARGUMENT


def sizing_args(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of a function of torch whose sizes decide those of its result."""
    if name.rstrip("_") in _SIZED_BY_FIRST:
        return args[:1]
    return tuple(each for part in args for each in (part if isinstance(part, (tuple, list)) else (part,)))


def is_assertion() -> bool:
    """Returns whether torch's own checks read the value: they end a plain loop as well, unless it is true."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _CHECKS:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch"


def unsteady(traces: Iterable[Trace], others: Iterable[Trace]) -> set[CodeLine]:
    """Returns the lines that read other values in other records of the same forward."""
    lines = set[CodeLine]()
    for pair in zip(traces, others, strict=True):
        one, other = (_values_read(trace) for trace in pair)
        lines |= {line for line, _ in {*one} ^ {*other}}
        lines |= {line for line, _ in (*one, *other)} if len(one) != len(other) else set()
    return lines


def _values_read(trace: Trace) -> list[tuple[CodeLine, str]]:
    checks = (call.function for call in trace.operations if isinstance(call.function, ValueCheck))
    numbers: dict[CodeLine, int] = {}
    values = []
    for check in checks:
        numbers[check.line] = numbers.get(check.line, 0) + 1
        values.append((check.line, f"{numbers[check.line]}: {check.value!r}"))
    return values


# What code hears that asks whether it is traced.

_alone = threading.Lock()  # the patch belongs to the process, where workers may be threads
_PROXY = torch.fx.Proxy


@contextlib.contextmanager
def answering(is_traced: Callable[[Tensor], bool] = lambda tensor: True) -> Iterator[None]:
    """Lets code of this thread hear that the tensors of `is_traced` are a tracer's."""
    recording = threading.get_ident()

    class Asked(type):
        def __instancecheck__(cls, instance: object) -> bool:
            is_ours = isinstance(instance, Tensor) and threading.get_ident() == recording and is_traced(instance)
            return is_ours or isinstance(instance, _PROXY)

    with _alone:
        setattr(torch.fx, "Proxy", Asked("Proxy", (_PROXY,), {}))  # noqa: B010
        try:
            yield
        finally:
            setattr(torch.fx, "Proxy", _PROXY)  # noqa: B010


# What is told about submodules that stay whole.


class WholePart(NamedTuple):
    """A submodule that stays whole although it has blocks, and the line because of which it does."""

    path: str
    error: UnrecordableError


def notes_on(parts: Sequence[WholePart]) -> tuple[str, ...]:
    """Returns a note for the user on each line because of which submodules stay whole."""
    paths: dict[str, list[str]] = {}
    errors = {}
    for path, error in parts:
        text = f"{told(error.line)}{error.words}"
        paths.setdefault(text, []).append(path)
        errors[text] = error
    return tuple(f"{_listed(paths[text])} stays one layer: {text} ({errors[text].hint})" for text in paths)


def notes_on_tracers(traces: Iterable[Trace]) -> tuple[str, ...]:
    """Returns a note for the user if code that hears of a tracer computes other bits."""
    lines = dict.fromkeys(line for trace in traces if trace.has_other_bits for line in trace.asking)
    return tuple(
        f"{told(line)}the answer, that a forward is recorded, gives other bits than a plain loop" for line in lines
    )


def _listed(paths: Sequence[str]) -> str:
    names = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in paths))
    more = f" and {len(names) - _ALIKE} more" if len(names) > _ALIKE else ""
    return ", ".join(names[:_ALIKE]) + more


def is_silent(function: object) -> bool:
    """Returns whether an operation is recorded although it returns no tensor."""
    return isinstance(function, (LeafCall, ValueCheck))
