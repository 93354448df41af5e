"""Missing gradients are minus zeros everywhere, because -0.0 + x is x to the bit; tensors are marked with the answer.

Rules: inspecting a gradient waits for the device, so the main thread inspects all it needs together, once per step.
Before that the answer follows from the origin: autograd did or did not make it, or the thread that received it has
inspected it. A mark only saves an inspection: a tensor without one is inspected. Gradients never change in place,
except by sums, which never turn an existing one into a missing one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_MARK = "is_missing_gradient"  # an attribute of a tensor


def marked(gradient: Tensor, is_missing: bool) -> Tensor:
    """Marks a gradient as missing or not, and returns it."""
    setattr(gradient, _MARK, is_missing)
    return gradient


def marked_as(gradient: Tensor, other: Tensor) -> Tensor:
    """Copies the mark of another gradient with the same bits to a gradient, and returns it."""
    mark = getattr(other, _MARK, None)
    return gradient if mark is None else marked(gradient, mark)


def is_missing(gradient: Tensor) -> bool:
    """Returns whether a gradient is minus zero everywhere, as is one without elements."""
    mark: bool | None = getattr(gradient, _MARK, None)
    if mark is not None:
        return mark
    if not _may_be_missing(gradient):
        return False
    if not gradient.numel():
        return True
    # The first element is nearly always another number, which saves inspecting the rest.
    return _is_minus_zero(gradient.as_strided((), ()).item()) and bool(_everywhere(gradient))


def look_at(gradients: Iterable[Tensor]) -> None:
    """Marks all unmarked gradients with a single wait for the device."""
    unknown = [
        grad for grad in gradients if getattr(grad, _MARK, None) is None and _may_be_missing(grad) and grad.numel()
    ]
    if not unknown:
        return
    firsts = torch.stack([grad.detach().as_strided((), ()).double() for grad in unknown]).tolist()
    for gradient, first in zip(unknown, firsts, strict=True):
        marked(gradient, _is_minus_zero(first) and bool(_everywhere(gradient)))


def made(gradient: Tensor) -> Tensor:
    """Returns a gradient made by autograd, with plain zeros in place of minus zeros; does not wait for a device."""
    if gradient.device.type == "cpu" or getattr(gradient, _MARK, None) is not None:
        if not is_missing(gradient):
            return marked(gradient, False)
        gradient = torch.zeros_like(gradient)
    elif _may_be_missing(gradient):
        gradient = gradient.masked_fill(_everywhere(gradient), 0.0)
    return marked(gradient, False) if gradient.numel() else gradient


def none_like(tensor: Tensor) -> Tensor:
    """Returns a missing gradient of a tensor."""
    return marked(torch.full_like(tensor, -0.0, requires_grad=False), _may_be_missing(tensor))


def _may_be_missing(gradient: Tensor) -> bool:
    return not gradient.is_sparse and gradient.is_floating_point()


def _is_minus_zero(value: float) -> bool:
    return value == 0 and math.copysign(1, value) < 0


def _everywhere(gradient: Tensor) -> Tensor:
    return torch.signbit(gradient).all() & ~gradient.any()
