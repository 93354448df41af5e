"""Slices of a microbatch along the sequence (dimension 1), and the layers that run them one after the other.

A layer takes slices if it has a method ``forward_slice(*inputs, start, state)``, which returns ``(outputs, state)``.
`start` is the position of the slice's first token. `state` is a tuple of tensors, what the layer keeps of earlier
slices: in causal attention their keys and values. It is empty before the first slice. For the slices of a sequence,
one after the other, the outputs are those of the layer for the whole sequence, up to rounding.

    slice 0   forward_slice(x0, start=0, state=())      -> y0, (keys, values)
    slice 1   forward_slice(x1, start=64, state=(k, v)) -> y1, (keys, values) of both
"""

from __future__ import annotations

from torch import Tensor, nn

from engine.core.errors import Problem, UserError
from engine.models.layers import Batch, LayerSpec, Tensors, as_tensors

_METHOD = "forward_slice"


def slice_of(batch: Batch, number: int, slices: int) -> Batch:
    """Returns one of `slices` equal slices of a microbatch; raises UserError if its tensors cannot be cut so."""
    if slices == 1:
        return batch
    return Batch(_cut(batch.inputs, number, slices), _cut(batch.targets, number, slices))


def _cut(tensors: Tensors, number: int, slices: int) -> Tensors:
    if len({_length(tensor) for tensor in tensors}) > 1 or any(_length(tensor) % slices for tensor in tensors):
        shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
        expected = "a number that divides the length of the sequences, dimension 1 of inputs and targets"
        raise UserError([Problem("slices", expected, f"{slices}, where they are {shapes}")])
    lengths = [_length(tensor) // slices for tensor in tensors]
    # Strides can decide bits.
    return tuple(
        tensor.narrow(1, number * length, length).contiguous() for tensor, length in zip(tensors, lengths, strict=True)
    )


def _length(tensor: Tensor) -> int:
    return tensor.shape[1] if tensor.dim() > 1 else -1


def refuse_whole(spec: LayerSpec, layer: nn.Module, where: str) -> None:
    """Raises UserError for a layer that takes whole sequences only."""
    if not callable(getattr(layer, _METHOD, None)):
        hint = "the layers of gpt have it; bamboo's docs say what it returns"
        raise UserError([Problem("slices", f"1, or layers with a method {_METHOD}", f"{where} has none", hint)])
    if spec.hands or spec.takes:
        raise UserError([Problem("slices", "1 with skip connections", f"{where} has one")])


def called_with_slice(
    layer: nn.Module, inputs: Tensors, start: int, state: Tensors, where: str
) -> tuple[Tensors, Tensors]:
    """Returns the outputs of a layer for a slice, and its state behind it; raises TypeError for other results."""
    returned = getattr(layer, _METHOD)(*inputs, start=start, state=state)
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], tuple)):
        raise TypeError(f"{where}: {_METHOD} must return its outputs and a tuple of tensors, its state")
    return as_tensors(returned[0], where), as_tensors(returned[1], where) if returned[1] else ()
