"""Writes the operations of a piece as one Python function, and compiles it.

Each operation has a line of its own. An exception in it is raised again at the line of the user's code that the
operation came from, so that messages show that line. The record was made on the host: a piece for another device names
that device wherever the record names the host, and copies the tensors there that it did not make itself.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby, starmap
from types import FunctionType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.models.layers import Tensors, flatten
from engine.models.traced.pieces import PlannedPiece
from engine.models.traced.recording import (
    BufferWrite,
    CodeLine,
    Context,
    HeldTensor,
    LeafCall,
    NamedState,
    TorchCall,
    TracedValue,
    sources_in,
)
from engine.models.user_code import RAISED

_FILE = "<piece of a module>"
_HOST = torch.device("cpu")


class PieceProgram(NamedTuple):
    """A compiled piece: a function of holders and inputs, its text, and the user's line behind each of its lines."""

    run: Callable[..., Tensors]
    text: str
    lines: Mapping[int, CodeLine]

    def __deepcopy__(self, memo: object) -> PieceProgram:
        return self  # nothing of it changes, and copies of a piece are made often

    def blamed(self, error: BaseException) -> BaseException:
        """Returns an exception of `run` with a traceback that ends in the user's line."""
        last: TracebackType | None = error.__traceback__
        number = 0
        while last is not None:
            if last.tb_frame.f_code is self.run.__code__:
                number = last.tb_lineno
            last = last.tb_next
        line = self.lines.get(number)
        if line is None or not line.file:
            return error
        raising = _raise_again.__code__.replace(
            co_filename=line.file, co_firstlineno=line.number - 1, co_name=line.function, co_qualname=line.function
        )
        try:
            FunctionType(raising, {})(error)
        except BaseException as same:
            return same
        return error


def _raise_again(error: BaseException) -> None:
    raise error


class Writer:
    """Writes one piece for a kind of device; `context` is the one in which it will be called."""

    def __init__(self, planned: PlannedPiece, context: Context, kind: str):
        self._planned, self._context, self._place = planned, context, torch.device(kind)
        self._names: dict[str, Any] = {"_flat": lambda made: flatten(made)[1], "_modes": partial(_modes, self._place)}
        self._known: dict[int, str] = {}  # name of a constant by id
        self._copies: dict[int, _DeviceCopy] = {}  # by the id of a held tensor
        self._holders: dict[tuple[str, str], str] = {}
        self._last: dict[TracedValue, int] = {}

    def program(self) -> tuple[PieceProgram, tuple[tuple[str, str], ...]]:
        """Returns the program, and the holders that it is called with: (kind, path of a module)."""
        planned = self._planned
        for number, call in enumerate(planned.operations):
            sources = (*call.sources(), *call.values())
            self._last |= {source: number for source in sources if isinstance(source, TracedValue)}
        end = len(planned.operations)
        self._last |= {source: end for source in sources_in(planned.leaving) if isinstance(source, TracedValue)}
        body: list[tuple[str, CodeLine]] = [
            (f"    {self._text(value)} = {self._text(value)}.clone()", CodeLine())
            for value in planned.entering
            if value in planned.copied
        ]
        numbered = enumerate(planned.operations)
        for context, group in groupby(numbered, key=lambda pair: pair[1].context):
            indent = "    "
            if context != self._context:
                modes = f"{context.has_gradients}, {context.is_autocast}, {self._constant(context.dtype)}"
                body.append((f"    with _modes({modes}):", CodeLine()))
                indent = "        "
            body += [(f"{indent}{self._line(number, each)}", each.line) for number, each in group]
        leaving = ", ".join(self._text(each) for each in planned.leaving)
        body.append((f"    return ({leaving},)" if leaving else "    return ()", CodeLine()))
        inputs = ", ".join(self._text(each) for each in planned.entering)
        head = [f"def run(holders, {inputs}):"]
        if self._holders:
            head.append(f"    ({', '.join(self._holders.values())},) = holders")
        text = "\n".join([*head, *(line for line, _ in body)]) + "\n"
        lines = {len(head) + 1 + number: line for number, (_, line) in enumerate(body)}
        return PieceProgram(_compiled(text, self._names), text, lines), tuple(self._holders)

    def _line(self, number: int, operation: TorchCall) -> str:
        function = operation.function
        dead = [each for each, last in self._last.items() if last == number]
        parts = [self._text(each) for each in operation.args]
        parts += [f"{name}={self._text(each)}" for name, each in operation.kwargs.items()]
        if isinstance(function, BufferWrite):
            return f"{self._text(function.place)} = {parts[0]}"
        if isinstance(function, LeafCall):
            call = f"_flat({self._holder('module', function.path)}.forward({', '.join(parts)}))"
        else:
            call = f"{self._constant(function)}({', '.join(parts)})"
        pattern = _pattern(operation.results)
        freed = f"; {' = '.join(f'v{each.number}' for each in dead)} = None" if dead else ""
        return f"{pattern} = {call}{freed}" if pattern else f"{call}{freed}"

    def _text(self, value: Any) -> str:  # noqa: PLR0911
        if isinstance(value, TracedValue):
            return f"v{value.number}"
        if isinstance(value, NamedState):
            if value in self._planned.entering:
                return f"b{self._planned.entering.index(value)}"
            return f"{self._holder('buffers' if value.is_buffer else 'parameters', value.holder)}[{value.key!r}]"
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return f"({''.join(f'{self._text(each)}, ' for each in value)})"
        if type(value) is list:
            return f"[{', '.join(map(self._text, value))}]"
        if type(value) is dict:
            return f"{{{', '.join(f'{key!r}: {self._text(each)}' for key, each in value.items())}}}"
        if type(value) is slice:
            return f"slice({', '.join(map(self._text, (value.start, value.stop, value.step)))})"
        is_literal = type(value) in (bool, int, str, type(None)) or (type(value) is float and math.isfinite(value))
        if is_literal:
            return repr(value)
        if isinstance(value, HeldTensor):
            is_there = value.tensor.device.type == self._place.type
            if is_there:
                return self._constant(value.tensor)
            return f"{self._constant(self._copies.setdefault(id(value), _DeviceCopy(value.tensor, self._place)))}()"
        return self._constant(self._place if value == _HOST else value)

    def _constant(self, value: object) -> str:
        name = self._known.get(id(value))
        if name is None:
            label = getattr(value, "__name__", "")
            name = f"{label if label.isidentifier() else 'c'}_{len(self._known)}"
            self._known[id(value)] = name
            self._names[name] = value
        return name

    def _holder(self, kind: str, path: str) -> str:
        return self._holders.setdefault((kind, path), f"{kind[0]}{len(self._holders)}")


def _pattern(results: Any) -> str:
    """Returns the left side of an assignment; empty if nothing of the results is new."""
    if isinstance(results, TracedValue):
        return f"v{results.number}"
    if isinstance(results, tuple) and any(True for _ in sources_in(results)):
        parts = [_pattern(each) or "_" for each in results]
        return f"({', '.join(parts)},)"
    return ""


def _compiled(text: str, names: dict[str, Any]) -> Callable[..., Tensors]:
    module = compile(text, _FILE, "exec")
    code = next(each for each in module.co_consts if hasattr(each, "co_code"))
    return FunctionType(code, names | {"__builtins__": builtins})  # torch may import a module in any of the calls


class _DeviceCopy:
    """Copies a tensor to a device at its first use: the process that writes a piece may not open one."""

    def __init__(self, tensor: Tensor, place: torch.device):
        self._tensor, self._place = tensor, place

    def __call__(self) -> Tensor:
        if self._tensor.device.type != self._place.type:
            self._tensor = self._tensor.to(self._place)
        return self._tensor


@contextlib.contextmanager
def _modes(place: torch.device, has_gradients: bool, is_autocast: bool, dtype: torch.dtype) -> Iterator[None]:
    """Runs operations with or without gradients and autocast."""
    with torch.set_grad_enabled(has_gradients), torch.autocast(place.type, dtype=dtype, enabled=is_autocast):
        yield


# One piece of a module: a layer with its own parameters and buffers, under the names that they have in the module.
Holders = tuple[tuple[str, str], ...]  # kind (parameters, buffers, module) and path of each


class Piece(nn.Module):
    """Runs one program in training and another one in evaluation."""

    def __init__(
        self,
        whole: nn.Module,
        places: Iterable[NamedState],
        leaves: Iterable[str],
        training: tuple[PieceProgram, Holders],
        evaluation: tuple[PieceProgram, Holders],
    ):
        super().__init__()
        for path in leaves:
            _make(self, path.rpartition(".")[0]).add_module(path.rpartition(".")[2], whole.get_submodule(path))
        for place in places:
            owner, holder = whole.get_submodule(place.holder), _make(self, place.holder)
            if holder is owner:
                continue  # it belongs to a leaf
            if place.is_buffer:
                persistent = place.key not in owner._non_persistent_buffers_set
                holder.register_buffer(place.key, owner._buffers[place.key], persistent)
            else:
                holder.register_parameter(place.key, owner._parameters[place.key])
        self._programs = (training[0], evaluation[0])
        # Dicts, in which other tensors may take the place of these.
        self._held = tuple(tuple(starmap(self._holder, holders)) for _, holders in (training, evaluation))

    @property
    def program(self) -> PieceProgram:
        """The program of training."""
        return self._programs[0]

    @property
    def holders(self) -> tuple[dict[str, Tensor | None], ...]:
        """The tensors of the program of training, as it finds them, if no submodule is called as a whole."""
        return tuple(holder for holder in self._held[0] if isinstance(holder, dict))

    def forward(self, *inputs: Tensor) -> Tensors:
        """Runs the operations of the piece; an exception shows the user's line."""
        mode = 0 if self.training else 1
        try:
            return self._programs[mode].run(self._held[mode], *inputs)
        except RAISED as error:
            raise self._programs[mode].blamed(error) from None

    def _holder(self, kind: str, path: str) -> object:
        module = self.get_submodule(path)
        return module if kind == "module" else vars(module)[f"_{kind}"]


def _make(root: nn.Module, path: str) -> nn.Module:
    """Returns the submodule at a path, made of empty modules where there is none."""
    module = root
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module
