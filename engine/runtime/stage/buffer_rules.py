"""Rules for the buffers of a layer, checked in the first forward of a stage.

A layer has all its buffers when it is built. They keep shape, type and shared memory, because the other replicas
receive them in this form. A forward changes only buffers of its own layer: a buffer of two layers would be two tensors
on two workers, and a tensor that is no buffer is not replicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from engine.core.errors import Problem, UserError
from engine.models.layers import Model
from engine.runtime.stage.buffers import BufferSnapshot, lending, modules_of, same_bits, snapshot_of
from engine.runtime.stage.state_hash import hash_tensors
from engine.runtime.transport.tensor_spec import bytes_of

BufferForm = list[dict[str, tuple[torch.dtype, torch.Size, int, int] | None]]
_Found = tuple[str, str]  # what breaks a rule, and the way out
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


def refuse_another_form(layers: Mapping[int, nn.Module], expected: BufferForm, found: BufferForm) -> None:
    """Raises UserError with the first buffer whose form has changed since its layer was built."""
    if expected == found:
        return
    for (index, path), one, other in zip(_modules_of(layers), expected, found, strict=True):
        for name in {**one, **other}:
            if name not in one or name not in other or one[name] != other[name]:
                raise UserError([Problem("model", _KEPT_FORM, f"otherwise: {path}{name!r} of layer {index}")])


@contextlib.contextmanager
def on_trial(layers: Mapping[int, nn.Module], model: Model) -> Iterator[None]:
    """Runs a forward on copies of the buffers; then raises UserError with every buffer that breaks a rule."""
    modules = modules_of(layers.values())
    own = snapshot_of(modules)
    marks = [hash_tensors([("", piece)]) for piece in own.memory]  # hashes, as a second copy could set the memory peak
    with lending(modules, own.copy().buffers()):
        yield
        form, changed = form_of(snapshot_of(modules)), _changed(own, snapshot_of(modules))
    refuse_another_form(layers, form_of(own), form)
    problems = list(_written_elsewhere(layers, own, marks)) or [
        *_held_elsewhere(layers, own, changed),
        *_held_by_others(layers, own, changed, model),
    ]
    if problems:
        raise UserError([Problem("model", _OWN_MEMORY, found, hint) for found, hint in problems])


def _changed(own: BufferSnapshot, after: BufferSnapshot) -> set[int]:
    """Returns the numbers of the buffers whose bytes a forward has changed."""
    pairs = zip(own.tensors(), after.tensors(), strict=False)
    return {number for number, pair in enumerate(pairs) if not same_bits(*map(_bytes, pair))}


def _bytes(tensor: Tensor) -> Tensor:
    return bytes_of(tensor.contiguous())


def _modules_of(layers: Mapping[int, nn.Module]) -> list[tuple[int, str]]:
    """Returns (layer, path) of each module; the path, with a final dot, precedes the names of its buffers."""
    return [(index, f"{path}." if path else "") for index, layer in layers.items() for path, _ in layer.named_modules()]


def _uses(layers: Mapping[int, nn.Module], snapshot: BufferSnapshot) -> Iterator[tuple[int, str, int]]:
    """Yields (layer, name, number) of each buffer."""
    for (index, path), named in zip(_modules_of(layers), snapshot.names, strict=True):
        yield from ((index, f"{path}{name}", at) for name, at in named.items() if at is not None)


def _written_elsewhere(layers: Mapping[int, nn.Module], own: BufferSnapshot, marks: list[str]) -> Iterator[_Found]:
    """Yields buffers that a forward has changed although it was lent copies."""
    wrong = {number for number, piece in enumerate(own.memory) if hash_tensors([("", piece)]) != marks[number]}
    for index, name, at in _uses(layers, own):
        if own.places[at].piece in wrong:
            yield f"{name!r} of layer {index}, changed in another way than by its name", _BY_NAME


def _held_elsewhere(layers: Mapping[int, nn.Module], own: BufferSnapshot, changed: set[int]) -> Iterator[_Found]:
    """Yields attributes that are not buffers but share the memory of a buffer that has changed."""
    pieces = {own.memory[own.places[at].piece].untyped_storage().data_ptr() for at in changed}
    for (index, path), module in zip(_modules_of(layers), modules_of(layers.values()), strict=True):
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.numel() and value.untyped_storage().data_ptr() in pieces:
                yield (
                    f"{path}{name!r} of layer {index}, which is not registered as the buffer that it lies in",
                    _REGISTER,
                )


def _held_by_others(
    layers: Mapping[int, nn.Module], own: BufferSnapshot, changed: set[int], model: Model
) -> Iterator[_Found]:
    """Yields changed buffers that another layer shares, or that the builder of this layer would return again."""
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
