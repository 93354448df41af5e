"""Finds the plain attributes of a module that carry something from one forward to the next: a record would freeze them.

An attribute that each forward sets anew, such as the last activations or a mask that is made once, does no harm: a
second forward then leaves it as the first one did, and returns the same. A counter or a growing list does not.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Collection, Mapping, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.traced.recording import CodeLine
from engine.models.traced.refusal import UnrecordableError
from engine.models.user_code import is_own

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
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if name not in _OF_TORCH
    }


def difference(
    one: Mapping[Attribute, str], other: Mapping[Attribute, str], leaves: Collection[str]
) -> list[Attribute]:
    """Returns the attributes that differ, those of outer modules first, without those of submodules in `leaves`."""
    found = [each for each in {**one, **other} if one.get(each) != other.get(each)]
    outside = [each for each in found if not any(f"{each[0]}.".startswith(f"{leaf}.") for leaf in leaves)]
    return sorted(outside, key=lambda each: each[0].count(".") + bool(each[0]))


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


def _text(value: object, seen: Set[int]) -> str:
    if isinstance(value, Tensor):
        return _text_of_tensor(value)
    if isinstance(value, _CODE) or id(value) in seen:
        return ""
    seen = {*seen, id(value)}
    if isinstance(value, Mapping):
        return ",".join(f"{_text(key, seen)}:{_text(each, seen)}" for key, each in value.items())
    if isinstance(value, (list, tuple, Set)):
        return f"[{','.join(_text(each, seen) for each in value)}]"
    if isinstance(raw := getattr(value, "tobytes", None), BuiltinFunctionType):
        return _hash_of(raw())
    own: Any = getattr(value, "__dict__", None)
    return _ADDRESS.sub("", repr(value)) if own is None else _text(own, seen)


def _text_of_tensor(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return repr(tensor)
    bits = (
        ""
        if isinstance(tensor, nn.Parameter)
        else _hash_of(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy())
    )  # the recorder watches parameters
    return f"{tensor.dtype}{list(tensor.shape)}{bits}"


def _hash_of(data: Any) -> str:
    return hashlib.blake2b(data).hexdigest()


def _line_of(module: nn.Module, name: str) -> CodeLine:
    """Returns the first line of the methods of a module that changes an attribute, those of its constructor last."""
    change = re.compile(rf"\.{re.escape(name)}{_CHANGES}")
    methods = [
        each
        for kind in type(module).__mro__
        for each in vars(kind).values()
        if isinstance(each, FunctionType) and is_own(each.__code__.co_filename)
    ]
    for method in sorted(methods, key=lambda each: (each.__name__ == "__init__", each.__name__ != "forward")):
        try:
            lines, first = inspect.getsourcelines(method)
        except (OSError, TypeError):
            continue
        for number, line in enumerate(lines, first):
            if change.search(line):
                return CodeLine(method.__code__.co_filename, number, method.__name__)
    return CodeLine()
