"""Finds the pieces that are pure by what they consist of: a list of torch's own operations on their tensors.

The recorder refuses what else could carry something from one forward to the next: generators, code and arrays as
arguments, parameters and tensors outside of the module that a forward overwrites. So a piece has no other state if no
operation runs the user's code (a submodule that is called as a whole, an own autograd function, an own kernel), writes
in place, or reads memory that nothing has written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.layers import sizes_of
from engine.models.traced.optional_masks import MaskDecision, OptionalMaskAttention
from engine.models.traced.pieces import PlannedPiece
from engine.models.traced.recording import Trace, text_of
from engine.models.traced.source_text import Piece

_TORCH = Path(torch.__file__).parent
_FILES = frozenset(str(_TORCH / name) for name in ("_tensor.py", "functional.py", "nn/functional.py"))
_OF_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_OF_WRITER = ("_flat", "_modes", "__builtins__")  # names in a program that it has not written itself
_VALUE = re.compile(r"\bv\d+\b")
_READ = (torch._C.TensorBase.T, torch._C.TensorBase.mT)


def is_straight(planned: PlannedPiece, trace: Trace, tensors: Iterable[Tensor]) -> bool:
    """Returns whether a piece with these parameters and buffers has torch's own operations only, all of them pure."""
    changes = any(place.name in trace.changed for place in planned.places() if place.is_buffer)
    are_plain = all(type(each) in (Tensor, nn.Parameter) and not _has_hooks(each) for each in tensors)
    is_pure = all(not call.written and _is_of_torch(call.function) for call in planned.operations)
    return is_pure and are_plain and not changes and not torch.nn.modules.module._has_any_global_hook()


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def _is_of_torch(function: Any) -> bool:
    if isinstance(function, (MaskDecision, OptionalMaskAttention)):
        return function.is_of_transformers
    if isinstance(function, FunctionType):
        return function.__code__.co_filename in _FILES
    if isinstance(function, MethodWrapperType):  # reads a property
        of = function.__self__
        return isinstance(of, GetSetDescriptorType) and of in _READ
    home = getattr(function, "__objclass__", function).__module__ or ""
    return isinstance(function, _OF_C) and home.partition(".")[0] == "torch" and not _is_unwritten(function.__name__)


def _is_unwritten(name: str) -> bool:
    """Returns whether a function of this name makes memory that nobody has written."""
    return "empty" in name or name.startswith(("resize", "set_"))


def first_alike(pieces: Sequence[Piece], straight: Collection[int]) -> dict[int, int]:
    """Returns for each straight piece, but the last, the first with the same operations and sizes."""
    first: dict[object, int] = {}
    return {each: first.setdefault(_content(pieces[each]), each) for each in sorted(straight) if each + 1 < len(pieces)}


def _content(piece: Piece) -> object:
    """Returns what decides which kernels a piece runs in training: its text, constants, and sizes of its tensors."""
    program, names = piece.program, dict[str, str]()
    text = _VALUE.sub(lambda value: names.setdefault(value[0], f"v{len(names)}"), program.text)
    constants = tuple(_key(each) for name, each in program.run.__globals__.items() if name not in _OF_WRITER)
    tensors = tuple((name, sizes_of(tensor)) for holder in piece.holders for name, tensor in holder.items())
    return text, constants, tensors


def _key(constant: Any) -> object:
    if isinstance(constant, (MaskDecision, OptionalMaskAttention)):
        return constant.content
    return constant if callable(constant) else text_of((constant,)) if isinstance(constant, Tensor) else repr(constant)
