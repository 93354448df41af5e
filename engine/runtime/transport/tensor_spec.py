"""Specs of the tensors between stages: learned once at the start, so that transfers carry data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from engine.models.layers import Tensors
from engine.runtime.device.device import Device


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, and whether its gradient is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Returns the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        """The size of such a tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def fits(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has this spec."""
        same_form = tensor.shape == self.shape and tensor.dtype == self.dtype
        return same_form and tensor.requires_grad == self.needs_grad

    def told(self, beside: TensorSpec) -> str:
        """Returns the spec in words, with its gradient where that alone tells it from the spec beside it."""
        words = f"{list(self.shape)} {self.dtype}"
        if (self.shape, self.dtype) != (beside.shape, beside.dtype):
            return words
        return f"{words} {'with' if self.needs_grad else 'without'} a gradient"

    def as_gradient(self) -> TensorSpec:
        """Returns the spec of the gradient of such a tensor."""
        return replace(self, needs_grad=False)

    def empty(self, device: Device) -> Tensor:
        """Returns an uninitialised tensor on a device."""
        return torch.empty(self.shape, dtype=self.dtype, device=device.place)

    def zeros(self, device: Device) -> Tensor:
        """Returns a tensor of zeros on a device as a trial input of a layer."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device.place).requires_grad_(self.needs_grad)

    def to_json(self) -> tuple[tuple[int, ...], str, bool]:
        """Returns the spec as plain values."""
        return self.shape, str(self.dtype).removeprefix("torch."), self.needs_grad

    @classmethod
    def from_json(cls, value: tuple[tuple[int, ...], str, bool]) -> TensorSpec:
        """Returns the spec for a value of `to_json`."""
        shape, dtype, needs_grad = value
        return cls(tuple(shape), getattr(torch, dtype), needs_grad)


Border = tuple[TensorSpec, ...]  # the tensors that one stage hands to the next


def border_of(tensors: Tensors) -> Border:
    """Returns the border of these tensors."""
    return tuple(TensorSpec.of(tensor) for tensor in tensors)


def difference(expected: Border, tensors: Tensors) -> str:
    """Returns in words what tensors have in place of the specs that were learned at the start; empty if they fit."""
    if len(tensors) == len(expected) and all(map(TensorSpec.fits, expected, tensors)):
        return ""
    found = border_of(tensors)
    wrong = " and ".join(
        f"{one.told(other)} instead of {other.told(one)}"
        for one, other in zip(found, expected, strict=False)
        if one != other
    )
    return wrong or f"{len(found)} tensors instead of {len(expected)}"


def laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Returns a gradient with the strides of its parameter; a copy only if they differ."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)
