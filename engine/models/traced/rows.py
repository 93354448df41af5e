"""Tells whether a recorded loss can be cut by samples: its shapes are constants, and its rows may be mixed.

It can if it is one known function of one output and the targets, which pairs the rows of both.
"""

from __future__ import annotations

from engine.models.traced.pieces import PlannedPiece
from engine.models.traced.recording import Trace, TracedValue

_PAIRING = frozenset(
    """
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits
    """.split()
)


def is_by_sample(loss: PlannedPiece, trace: Trace, size: int) -> bool:
    """Returns whether the loss of the first samples of a microbatch of `size` is that of the first rows."""
    if len(loss.operations) != 1 or len(trace.targets) != 1:
        return False
    (operation,) = loss.operations
    is_known = getattr(operation.function, "__name__", "") in _PAIRING
    if not is_known or len(operation.args) != 2 or operation.kwargs.get("reduction", "mean") != "mean":
        return False
    output, target = operation.args
    if not isinstance(output, TracedValue) or target != trace.targets[0] or loss.entering != (output, target):
        return False
    return all(trace.shapes[each][1][:1] == (size,) for each in (output, target))
