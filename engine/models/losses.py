"""The loss and the metric of the built-in models: pure functions of (outputs, targets), means over the microbatch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from engine.models.layers import Tensors

IGNORED = -100  # the target of a position that does not count; torch's own value


def default_loss(outputs: Tensors, targets: Tensors) -> Tensor:
    """Returns the cross-entropy over the last dimension in nats, or the mean square error for float targets.

    It compares the first output, converted to float32 (under autocast it is bfloat16), with the first target.
    """
    output, target = outputs[0].float(), targets[0]
    if target.is_floating_point():
        return (output - target).square().mean()
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def accuracy(outputs: Tensors, targets: Tensors) -> Tensor:
    """Returns the fraction of samples, in 0..1, whose largest output is the target class."""
    return (outputs[0].argmax(dim=-1) == targets[0]).float().mean()
