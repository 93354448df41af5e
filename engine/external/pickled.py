"""Reads pickled data without running it: names of classes and functions stay names, and nothing is imported or called.

It is for files that other tools write as pickle: the metadata of torch's distributed checkpoints, and the dumps of
NCCL's flight recorder.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.core.errors import StorageError


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object that a pickle would make: the name of its class or function, the arguments, and the state set after."""

    name: str
    args: Any = None
    state: Any = None


_VALUES = frozenset(
    """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES
    BINBYTES8 BYTEARRAY8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8
    """.split()
)
_MAKES: Mapping[str, Callable[[], Any]] = {
    **{"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False},
    **{"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_SET": set},
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
_CALLS = ("REDUCE", "NEWOBJ")


def unpickled(data: bytes, source: str) -> Any:
    """Returns the value of a pickle, with `PickledObject`s for anything but plain values; raises StorageError."""
    machine = _Machine()
    try:
        for code, argument, _ in pickletools.genops(data):
            if code.name == "STOP":
                return machine.stack.pop()
            machine.step(code.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise StorageError(f"{source}: no pickled data that can be read without running it: {error}") from error
    raise StorageError(f"{source}: the pickled data ends too early")


class _Machine:
    """The stack of values, the places of its marks, and the values that were numbered."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Carries out one instruction."""
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _MAKES:
            stack.append(_MAKES[name]())
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name in _PUTS or name == "MEMOIZE":
            self._memo[len(self._memo) if argument is None else int(argument)] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo[int(argument)])
        elif name in _CALLS:
            args, called = stack.pop(), stack.pop()
            stack.append(PickledObject(called.name, args))
        elif name == "GLOBAL":
            stack.append(PickledObject(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            last, first = stack.pop(), stack.pop()
            stack.append(PickledObject(f"{first}.{last}"))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name not in ("PROTO", "FRAME"):
            self._fill(name)

    def _fill(self, name: str) -> None:
        """Carries out an instruction that adds to a container."""
        stack = self.stack
        if name in ("APPEND", "SETITEM"):
            items = stack[-1:] if name == "APPEND" else stack[-2:]
            del stack[-len(items) :]
        else:
            begin = self._marks.pop()
            items = stack[begin:]
            del stack[begin:]
        match name:
            case "APPEND" | "APPENDS":
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "ADDITEMS":
                stack[-1].update(items)
            case "LIST" | "TUPLE" | "DICT" | "FROZENSET":
                make: dict[str, Callable[[list[Any]], Any]] = {"LIST": list, "TUPLE": tuple, "FROZENSET": frozenset}
                stack.append(dict(zip(items[::2], items[1::2], strict=True)) if name == "DICT" else make[name](items))
            case _:
                raise ValueError(f"the instruction {name}")
