"""Buffers of layers (BatchNorm's averages): copied, lent to a forward that must leave no trace, remembered for a redo.

Rules: the tensors themselves are swapped, never overwritten, where autograd may have saved one for a backward. Copies
are laid out as the buffers are, for strides can decide bits, and share memory with each other wherever the buffers do:
one buffer may have several names, or be a view of another. What is remembered is never changed, so that it need not be
copied again before the buffers differ from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

Buffers = list[dict[str, Tensor | None]]  # of each module, in order
_ALIGNED = 64  # bytes: where torch lets memory begin; how far from there a tensor begins can decide bits
_MANY = 4096  # bytes from which it pays to compare them eight at a time


class Place(NamedTuple):
    """How a tensor lies in a piece of memory; the offset counts elements."""

    piece: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The buffers of some modules: the memory in which they lie, as bytes, and where in it each tensor is."""

    memory: tuple[Tensor, ...]
    places: tuple[Place, ...]  # of each tensor once, whatever names it has
    names: list[dict[str, int | None]]  # of each module: which tensor it is

    def tensors(self) -> list[Tensor]:
        """Returns each tensor once, in order."""
        return [_placed(self.memory[place.piece], place) for place in self.places]

    def buffers(self) -> Buffers:
        """Returns the buffers of each module."""
        tensors = self.tensors()
        return [{name: None if at is None else tensors[at] for name, at in named.items()} for named in self.names]

    def copy(self) -> Snapshot:
        """Returns the same buffers in memory of their own."""
        return replace(self, memory=tuple(piece.clone() for piece in self.memory))


def modules_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns all modules of some layers, in order."""
    return [module for layer in layers for module in layer.modules()]


def snapshot_of(modules: Sequence[nn.Module]) -> Snapshot:
    """Returns the buffers as they are, in the memory that they have: not copies."""
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in numbers:
                numbers[id(buffer)] = len(tensors)
                tensors.append(buffer)
    spans: dict[int, tuple[int, int]] = {}  # of each storage, by its address: the bytes in which buffers lie
    for tensor in tensors:
        first, last = spans.get(address := _address(tensor), (tensor.untyped_storage().nbytes(), 0))
        start, end = _span(tensor)
        spans[address] = min(first, start), max(last, end)
    storages = {_address(tensor): tensor.untyped_storage() for tensor in tensors}
    pieces = {address: number for number, address in enumerate(spans)}
    return Snapshot(
        tuple(
            torch.empty(0, dtype=torch.uint8).set_(storages[address], first, (last - first,), (1,))
            for address, (first, last) in spans.items()
        ),
        tuple(
            Place(
                pieces[address := _address(tensor)],
                tensor.dtype,
                int(tensor.storage_offset()) - spans[address][0] // tensor.itemsize,
                tensor.shape,
                tensor.stride(),
            )
            for tensor in tensors
        ),
        [
            {name: None if each is None else numbers[id(each)] for name, each in module._buffers.items()}
            for module in modules
        ],
    )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of its storage that a tensor lies in, aligned, and the one behind the last."""
    start = int(tensor.storage_offset())
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + 1 + extent if tensor.numel() else start
    return start * tensor.itemsize // _ALIGNED * _ALIGNED, end * tensor.itemsize


def _placed(piece: Tensor, place: Place) -> Tensor:
    offset = piece.storage_offset() // place.dtype.itemsize + place.offset
    return torch.empty(0, dtype=place.dtype).set_(piece.untyped_storage(), offset, place.size, place.stride)


def copy_buffers(modules: Sequence[nn.Module]) -> Buffers:
    """Returns copies of the buffers as they are now."""
    return snapshot_of(modules).copy().buffers()


def overwrite(buffer: Tensor, values: Tensor) -> None:
    """Gives a buffer other values, also one that was expanded: several of its elements are one in memory."""
    for dimension, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dimension] > 1:
            buffer, values = buffer.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    buffer.copy_(values)


@contextlib.contextmanager
def lending(modules: Sequence[nn.Module], buffers: Buffers) -> Iterator[None]:
    """Has the modules use these buffers in place of their own."""
    kept = [dict(module._buffers) for module in modules]
    for module, lent in zip(modules, buffers, strict=True):
        module._buffers.update(lent)
    try:
        yield
    finally:
        for module, own in zip(modules, kept, strict=True):
            module._buffers.clear()  # a forward may have made one more
            module._buffers.update(own)


@contextlib.contextmanager
def in_use(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Has modules run as in use, not in training: no dropout, no gradients, and buffers as they are, afterwards too."""
    training = [module for module in modules if module.training]
    with torch.no_grad(), lending(modules, copy_buffers(modules)):
        for module in training:
            module.training = False
        yield
        # A user may have frozen the statistics of a batch norm: what was not training before is not afterwards.
        for module in training:
            module.training = True


@dataclass(slots=True)
class BufferHistory:
    """Takes snapshots of some modules to keep; what has not changed since the last one is not copied again."""

    modules: list[nn.Module]
    _before: dict[int, Snapshot] = field(default_factory=dict)  # the forwards of the open step
    _last: tuple[Tensor, ...] = ()

    def keep(self) -> Snapshot:
        """Returns the buffers as they are now, in memory that nobody may change."""
        now = snapshot_of(self.modules)
        known = [*self._last, *[None] * len(now.memory)]
        self._last = tuple(
            last if last is not None and same_bits(last, piece) else piece.clone()
            for last, piece in zip(known, now.memory, strict=False)
        )
        return replace(now, memory=self._last)

    def note(self, microbatch: int) -> None:
        """Remembers the buffers as they are now, before the forward of `microbatch`."""
        self._before[microbatch] = self.keep()

    def forget_step(self) -> None:
        """Forgets the forwards of a step."""
        self._before = {}

    def before(self, microbatch: int) -> Snapshot:
        """Returns the buffers as they were before that forward, or as they are if it has not been seen; not copies."""
        return self._before.get(microbatch) or snapshot_of(self.modules)

    def take_over(self, befores: Mapping[int, Snapshot]) -> None:
        """Takes in the buffers before some forwards of another replica; those before the last are the buffers now."""
        self._before |= befores
        for module, now in zip(self.modules, befores[max(befores)].copy().buffers(), strict=True):
            module._buffers.update(now)

    def copy_before(self, microbatch: int) -> Buffers:
        """Returns copies of the buffers as they were before that forward; as they are now if it has not been seen."""
        return self.before(microbatch).copy().buffers()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compares bytes, all of them: BatchNorm does not count its changes in the version of a tensor."""
    if one.shape != other.shape:
        return False
    many = len(one) // 8 * 8 if len(one) >= _MANY else 0
    in_eights = torch.equal(one[:many].view(torch.int64), other[:many].view(torch.int64))
    return in_eights and torch.equal(one[many:], other[many:])
