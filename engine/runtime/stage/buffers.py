"""Buffers of layers (such as BatchNorm's averages): copies, loans to a forward without side effects, and history.

Rules: a loan swaps the tensor objects and never overwrites them, because autograd may have saved one for a backward.
Copies have the strides of the buffers, because strides can decide bits. Copies share memory where the buffers do: a
buffer may have several names or be a view of another. Snapshots in the history are never changed, so an unchanged
buffer is not copied again. An heir redoes the chain from the step boundary: logging the history would cost every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.core.errors import Problem, UserError
from engine.models.layers import Model
from engine.runtime.device.device import Device
from engine.runtime.stage.state_hash import hash_tensors
from engine.runtime.transport.transport import bytes_of

_BUFFERS = attrgetter("_buffers")
Buffers = list[dict[str, Tensor | None]]  # name -> buffer of each module, in order
_ALIGNED = 64  # bytes: torch's alignment; the offset of a tensor from it can decide bits
_MANY = 4096  # bytes from which comparing eight at a time pays off


class BufferPlace(NamedTuple):
    """The layout of a tensor in a piece of memory; the offset is in elements."""

    piece: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BufferSnapshot:
    """The buffers of some modules: their memory in pieces of bytes, and the place of each tensor in it."""

    memory: tuple[Tensor, ...]
    places: tuple[BufferPlace, ...]  # of each distinct tensor
    names: list[dict[str, int | None]]  # name -> number of the tensor, of each module

    def tensors(self) -> list[Tensor]:
        """Returns the distinct tensors, in order; they share the memory of the snapshot."""
        return [placed(self.memory[place.piece], place) for place in self.places]

    def buffers(self) -> Buffers:
        """Returns the buffers of each module."""
        tensors = self.tensors()
        return [{name: None if at is None else tensors[at] for name, at in named.items()} for named in self.names]

    def put(self, device: Device) -> BufferSnapshot:
        """Returns the buffers on a device, sharing memory as they do here."""
        return replace(self, memory=tuple(device.put(piece) for piece in self.memory))

    def copy(self) -> BufferSnapshot:
        """Returns a copy with its own memory."""
        return replace(self, memory=tuple(piece.clone() for piece in self.memory))


def modules_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns all modules of some layers, in order."""
    return [module for layer in layers for module in layer.modules()]


def snapshot_of(modules: Sequence[nn.Module]) -> BufferSnapshot:
    """Returns a snapshot that shares the memory of the buffers, without copies."""
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in numbers:
                numbers[id(buffer)] = len(tensors)
                tensors.append(buffer)
    names = [
        {name: None if buffer is None else numbers[id(buffer)] for name, buffer in module._buffers.items()}
        for module in modules
    ]
    return BufferSnapshot(*in_pieces(tensors), names)


def in_pieces(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[BufferPlace, ...]]:
    """Returns the memory of some tensors in pieces of bytes, without copies, and the place of each tensor in it."""
    spans: dict[int, tuple[int, int]] = {}  # address of a storage -> first and end byte of the tensors in it
    for tensor in tensors:
        first, last = spans.get(address := _address(tensor), (tensor.untyped_storage().nbytes(), 0))
        start, end = _span(tensor)
        spans[address] = min(first, start), max(last, end)
    holders = {_address(tensor): tensor for tensor in tensors}
    pieces = {address: number for number, address in enumerate(spans)}
    return (
        tuple(_memory_of(holders[address], first, last) for address, (first, last) in spans.items()),
        tuple(
            BufferPlace(
                pieces[address := _address(tensor)],
                tensor.dtype,
                int(tensor.storage_offset()) - spans[address][0] // tensor.itemsize,
                tensor.shape,
                tensor.stride(),
            )
            for tensor in tensors
        ),
    )


def _memory_of(holder: Tensor, first: int, last: int) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=holder.device)
    return empty.set_(holder.untyped_storage(), first, (last - first,), (1,))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the range of bytes that a tensor covers in its storage, with the start rounded down to alignment."""
    start = int(tensor.storage_offset())
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + 1 + extent if tensor.numel() else start
    return start * tensor.itemsize // _ALIGNED * _ALIGNED, end * tensor.itemsize


def placed(piece: Tensor, place: BufferPlace) -> Tensor:
    """Returns the tensor at a place in a piece of memory, which it shares."""
    offset = piece.storage_offset() // place.dtype.itemsize + place.offset
    empty = torch.empty(0, dtype=place.dtype, device=piece.device)
    return empty.set_(piece.untyped_storage(), offset, place.size, place.stride)


def overwrite(buffer: Tensor, values: Tensor) -> None:
    """Copies `values` into a buffer, even an expanded one, whose elements share memory (stride 0)."""
    for dimension, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dimension] > 1:
            buffer, values = buffer.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    buffer.copy_(values)


@contextlib.contextmanager
def lending(modules: Sequence[nn.Module], buffers: Buffers) -> Iterator[None]:
    """Makes the modules use these buffers in place of their own."""
    own_buffers = [dict(module._buffers) for module in modules]
    for module, lent in zip(modules, buffers, strict=True):
        module._buffers.update(lent)
    try:
        yield
    finally:
        for module, own in zip(modules, own_buffers, strict=True):
            module._buffers.clear()  # a forward may have registered another
            module._buffers.update(own)


@contextlib.contextmanager
def in_use(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Runs modules in evaluation mode: no dropout, no gradients, and buffers unchanged afterwards."""
    training = [module for module in modules if module.training]
    with torch.no_grad(), lending(modules, snapshot_of(modules).copy().buffers()):
        for module in training:
            module.training = False
        yield
        # Not `train()` on all: a user may freeze the statistics of a batch norm by putting it into evaluation mode.
        for module in training:
            module.training = True


@dataclass(slots=True)
class BufferHistory:
    """Snapshots of the buffers of some modules; an unchanged piece of memory is not copied again."""

    modules: list[nn.Module]
    _before: dict[int, BufferSnapshot] = field(default_factory=dict)  # before each forward of the open step
    _last: tuple[Tensor, ...] = ()

    def keep(self) -> BufferSnapshot:
        """Returns a snapshot of the buffers in memory of its own, which must not change."""
        if not any(map(_BUFFERS, self.modules)):
            return BufferSnapshot((), (), [{}] * len(self.modules))
        now = snapshot_of(self.modules)
        self._last = tuple(
            last if last is not None and same_bits(last, piece) else piece.clone()
            for last, piece in zip_longest(self._last[: len(now.memory)], now.memory)
        )
        return replace(now, memory=self._last)

    def note(self, microbatch: int) -> None:
        """Keeps a snapshot of the buffers from before the forward of `microbatch`."""
        self._before[microbatch] = self.keep()

    def forget_step(self) -> None:
        """Drops the snapshots of a step."""
        self._before = {}

    def before(self, microbatch: int) -> BufferSnapshot:
        """Returns the buffers from before that forward, or without a snapshot the current ones; no copies."""
        return self._before.get(microbatch) or snapshot_of(self.modules)

    def take_over(self, befores: Mapping[int, BufferSnapshot]) -> None:
        """Adds snapshots of another replica; sets the buffers to those from before the last of these forwards."""
        self._before |= befores
        for module, now in zip(self.modules, befores[max(befores)].copy().buffers(), strict=True):
            module._buffers.update(now)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two byte tensors are equal. A tensor's version would not do: BatchNorm does not increment it."""
    if one.shape != other.shape:
        return False
    many = len(one) // 8 * 8 if len(one) >= _MANY else 0
    in_eights = torch.equal(one[:many].view(torch.int64), other[:many].view(torch.int64))
    return in_eights and torch.equal(one[many:], other[many:])


def named_copies(layers: Mapping[int, nn.Module], copies: Sequence[Tensor]) -> dict[int, list[tuple[str, Tensor]]]:
    """Returns copies of the distinct buffers of layers, given in order, by layer and with their names."""
    distinct = dict.fromkeys(id(buffer) for layer in layers.values() for buffer in layer.buffers())
    copy_of = dict(zip(distinct, copies, strict=False))
    return {
        index: [(name, copy_of[id(buffer)]) for name, buffer in layer.named_buffers()]
        for index, layer in layers.items()
    }


# Rules for the buffers of a layer, checked in the first forward of a stage.
#
# A layer has all its buffers when it is built. They keep shape, type and shared memory, because other replicas receive
# them in this form. A forward changes only buffers of its own layer: a buffer shared by two layers would be two tensors
# on two workers, and a tensor that is not a buffer is not replicated.

BufferForm = list[dict[str, tuple[torch.dtype, torch.Size, int, int] | None]]
_Violation = tuple[str, str]  # the violation, and how to fix it
_KEPT_FORM = "each layer to have all its buffers when it is built, and to keep their shapes, types and shared memory"
_OWN_MEMORY = "a forward to change only buffers, and only those of its own layer"
_BY_NAME = "change it as an attribute of its module, as in `self.count += 1`"
_REGISTER = "register it with register_buffer too, or give it a memory of its own with `.clone()`"
_HAND_ON = "read it in the layer that changes it, and hand the value on as an output or a skip connection"
_OF_THE_LAYER = "make it in the constructor of the layer"


def form_of(snapshot: BufferSnapshot) -> BufferForm:
    """Returns the form of each module's buffers, which must not change: names, types, shapes, shared memory."""
    places = snapshot.places
    return [
        {
            name: None if at is None else (places[at].dtype, places[at].size, places[at].piece, at)
            for name, at in named.items()
        }
        for named in snapshot.names
    ]


def refuse_another_form(layers: Mapping[int, nn.Module], expected: BufferForm, actual: BufferForm) -> None:
    """Raises UserError with the first buffer whose form has changed since its layer was built."""
    if expected == actual:
        return
    for (index, path), one, other in zip(_modules_of(layers), expected, actual, strict=True):
        for name in {**one, **other}:
            if name not in one or name not in other or one[name] != other[name]:
                raise UserError([Problem("model", _KEPT_FORM, f"otherwise: {path}{name!r} of layer {index}")])


@contextlib.contextmanager
def on_trial(layers: Mapping[int, nn.Module], model: Model) -> Iterator[None]:
    """Runs a forward on copies of the buffers; then raises UserError with every buffer that breaks a rule."""
    modules = modules_of(layers.values())
    own = snapshot_of(modules)
    marks = [hash_tensors([("", piece)]) for piece in own.memory]  # a second copy could raise the memory peak
    with lending(modules, own.copy().buffers()):
        yield
        form, changed = form_of(snapshot_of(modules)), _changed(own, snapshot_of(modules))
    refuse_another_form(layers, form_of(own), form)
    problems = list(_written_elsewhere(layers, own, marks)) or [
        *_held_elsewhere(layers, own, changed),
        *_held_by_others(layers, own, changed, model),
    ]
    if problems:
        raise UserError([Problem("model", _OWN_MEMORY, violation, hint) for violation, hint in problems])


def _changed(own: BufferSnapshot, after: BufferSnapshot) -> set[int]:
    """Returns the numbers of the buffers that a forward has changed."""
    pairs = [[bytes_of(tensor.contiguous()) for tensor in snapshot.tensors()] for snapshot in (own, after)]
    return {number for number, pair in enumerate(zip(*pairs, strict=False)) if not same_bits(*pair)}


def _modules_of(layers: Mapping[int, nn.Module]) -> list[tuple[int, str]]:
    """Returns (layer, path) of each module; the path ends in a dot and prefixes the names of its buffers."""
    return [(index, f"{path}." if path else "") for index, layer in layers.items() for path, _ in layer.named_modules()]


def _uses(layers: Mapping[int, nn.Module], snapshot: BufferSnapshot) -> Iterator[tuple[int, str, int]]:
    for (index, path), named in zip(_modules_of(layers), snapshot.names, strict=True):
        yield from ((index, f"{path}{name}", at) for name, at in named.items() if at is not None)


def _written_elsewhere(layers: Mapping[int, nn.Module], own: BufferSnapshot, marks: list[str]) -> Iterator[_Violation]:
    """Yields buffers that a forward has changed although it ran on copies."""
    wrong = {number for number, piece in enumerate(own.memory) if hash_tensors([("", piece)]) != marks[number]}
    for index, name, at in _uses(layers, own):
        if own.places[at].piece in wrong:
            yield f"{name!r} of layer {index}, changed in another way than by its name", _BY_NAME


def _held_elsewhere(layers: Mapping[int, nn.Module], own: BufferSnapshot, changed: set[int]) -> Iterator[_Violation]:
    """Yields attributes that are not buffers but share the memory of a changed buffer."""
    pieces = {own.memory[own.places[at].piece].untyped_storage().data_ptr() for at in changed}
    for (index, path), module in zip(_modules_of(layers), modules_of(layers.values()), strict=True):
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.numel() and value.untyped_storage().data_ptr() in pieces:
                where = f"{path}{name!r} of layer {index}"
                yield f"{where}, which is not registered as the buffer that it lies in", _REGISTER


def _held_by_others(
    layers: Mapping[int, nn.Module], own: BufferSnapshot, changed: set[int], model: Model
) -> Iterator[_Violation]:
    """Yields changed buffers shared with another layer, or returned again by the builder of this one."""
    declared = {use: uses for uses in model.shared_buffers for use in uses}
    of_changed = [(index, name, own.places[at].piece) for index, name, at in _uses(layers, own) if at in changed]
    addresses: set[int] = set()
    for index in {index: None for index, _, _ in of_changed}:
        again = snapshot_of(modules_of([model.layers[index].build()]))
        addresses |= {piece.untyped_storage().data_ptr() for piece in again.memory}
        del again
    for index, name, piece in of_changed:
        if (index, name) in declared:
            others = sorted({other for other, _ in declared[index, name]} - {index})
            yield f"{name!r} of layer {index}, which layer {' and '.join(map(str, others))} has too", _HAND_ON
        elif own.memory[piece].untyped_storage().data_ptr() in addresses:
            yield f"{name!r} of layer {index}, whose builder returns it again", _OF_THE_LAYER
