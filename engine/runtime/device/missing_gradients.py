"""Missing gradients: minus zeros everywhere, since -0.0 + x is x to the bit. What is known of one is marked on it.

Rules: a look at a gradient waits for the device, so the main thread looks once a step, at all that it has to know
together. Before that a gradient is known by its origin: autograd made it or did not; its message was looked at by the
thread that took it in. A mark only saves a look: a tensor without one is looked at. A gradient never changes in place,
but for a sum, which does not make a missing one of one that is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_MARK = "is_missing_gradient"  # an attribute of a tensor


def marked(gradient: Tensor, is_missing: bool) -> Tensor:
    """Returns a gradient of which it is known whether it is missing."""
    setattr(gradient, _MARK, is_missing)
    return gradient


def marked_as(gradient: Tensor, other: Tensor) -> Tensor:
    """Returns a gradient of which as much is known as of another one with the same bits."""
    known = _known(other)
    return gradient if known is None else marked(gradient, known)


def _known(gradient: Tensor) -> bool | None:
    return getattr(gradient, _MARK, None)


def is_missing(gradient: Tensor) -> bool:
    """Returns whether a gradient is minus zero everywhere; so is one without elements."""
    known = _known(gradient)
    if known is not None:
        return known
    if not _may_be_missing(gradient):
        return False
    if not gradient.numel():
        return True
    # The first is nearly always another number, which costs no look at the rest.
    return _is_minus_zero(gradient.as_strided((), ()).item()) and bool(_everywhere(gradient))


def look_at(gradients: Iterable[Tensor]) -> None:
    """Marks gradients of which nothing is known, with one look at all of them."""
    unknown = [each for each in gradients if _known(each) is None and _may_be_missing(each) and each.numel()]
    if not unknown:
        return
    firsts = torch.stack([each.detach().as_strided((), ()).double() for each in unknown]).tolist()
    for gradient, first in zip(unknown, firsts, strict=True):
        marked(gradient, _is_minus_zero(first) and bool(_everywhere(gradient)))


def made(gradient: Tensor) -> Tensor:
    """Returns a gradient that autograd has made: plain zeros for one of minus zeros. On a device nobody waits."""
    if not _may_be_missing(gradient):
        return marked(gradient, False)
    if not gradient.numel():
        return torch.zeros_like(gradient)
    if gradient.device.type == "cpu" or _known(gradient) is not None:
        gradient = torch.zeros_like(gradient) if is_missing(gradient) else gradient
    else:
        gradient = gradient.masked_fill(_everywhere(gradient), 0.0)
    return marked(gradient, False)


def none_like(tensor: Tensor) -> Tensor:
    """Returns a missing gradient of a tensor."""
    return marked(torch.full_like(tensor, -0.0, requires_grad=False), _may_be_missing(tensor))


def _may_be_missing(gradient: Tensor) -> bool:
    return not gradient.is_sparse and gradient.is_floating_point()


def _is_minus_zero(value: float) -> bool:
    return value == 0 and math.copysign(1, value) < 0


def _everywhere(gradient: Tensor) -> Tensor:
    return torch.signbit(gradient).all() & ~gradient.any()
