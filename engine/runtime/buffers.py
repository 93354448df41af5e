"""Buffers of layers (BatchNorm's averages): copied, lent to a forward that must leave no trace, remembered for a redo.

The tensors themselves are swapped, never overwritten, where autograd may have saved one for a backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Buffers = list[dict[str, Tensor | None]]  # of each module, in order


def modules_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns all modules of some layers, in order: one may get its first buffer in a forward."""
    return [module for layer in layers for module in layer.modules()]


def copy_buffers(modules: Sequence[nn.Module]) -> Buffers:
    """Returns copies of the buffers as they are now."""
    return _copies([module._buffers for module in modules])


def _copies(buffers: Buffers) -> Buffers:
    made: dict[int, Tensor] = {}  # two modules may share one

    def copy(buffer: Tensor | None) -> Tensor | None:
        return None if buffer is None else made.setdefault(id(buffer), buffer.clone())

    return [{name: copy(each) for name, each in named.items()} for named in buffers]


@contextlib.contextmanager
def lending(modules: Sequence[nn.Module], buffers: Buffers) -> Iterator[None]:
    """Has the modules use these buffers in place of their own; one that they make meanwhile goes with them."""
    kept = [dict(module._buffers) for module in modules]
    _give(modules, buffers)
    try:
        yield
    finally:
        _give(modules, kept)


def _give(modules: Sequence[nn.Module], buffers: Buffers) -> None:
    for module, named in zip(modules, buffers, strict=True):
        module._buffers.clear()
        module._buffers.update(named)


@dataclass(slots=True)
class BufferHistory:
    """The buffers of some modules as they were before each forward of a step; what did not change is copied once."""

    modules: list[nn.Module]
    _before: dict[int, Buffers] = field(default_factory=dict)
    _last: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def note(self, microbatch: int) -> None:
        """Remembers the buffers as they are now, before the forward of `microbatch`."""
        copies: dict[int, Tensor] = {}  # two modules may share one
        self._before[microbatch] = [
            {name: self._copy(place, name, buffer, copies) for name, buffer in module._buffers.items()}
            for place, module in enumerate(self.modules)
        ]

    def _copy(self, place: int, name: str, buffer: Tensor | None, copies: dict[int, Tensor]) -> Tensor | None:
        if buffer is None:
            return None
        if id(buffer) not in copies:
            last = self._last.get((place, name))
            if last is None or not _same_bits(last, buffer):
                last = self._last[place, name] = buffer.clone()
            copies[id(buffer)] = last
        return copies[id(buffer)]

    def before(self, microbatch: int) -> Buffers:
        """Returns the buffers as they were before that forward, or as they are if it has not been seen; not copies."""
        return self._before.get(microbatch) or [module._buffers for module in self.modules]

    def take_over(self, befores: Mapping[int, Buffers]) -> None:
        """Takes in the buffers before some forwards of another replica; those before the last are the buffers now."""
        self._before |= befores
        replaced: dict[int, Tensor] = {}  # two modules may share one
        for module, now in zip(self.modules, self._before[max(befores)], strict=True):
            for name, buffer in now.items():
                old = module._buffers[name]
                if old is not None and buffer is not None:
                    module._buffers[name] = replaced.setdefault(id(old), buffer.clone())

    def copy_before(self, microbatch: int) -> Buffers:
        """Returns copies of the buffers as they were before that forward; as they are now if it has not been seen."""
        return _copies(self.before(microbatch))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Compares the contents: BatchNorm does not count its changes in the version of a tensor."""
    same_form = one.shape == other.shape and one.dtype == other.dtype
    return same_form and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
