"""The memory model: how many bytes of tensors a worker holds at most in a step, from its program and its stages' sizes.

Rules, each a line of `peak_bytes`: a replica, owned or shadowed, has weights and two moments of AdamW. A forward adds
its residual, and its input where that came from another worker. A backward (of two parts, that for the weights) frees
both, but what was made for others
(output forward, gradient of the input back) stays until the commit; the first one adds the accumulator. A redundant
forward is never freed before the commit. A shadow receives one gradient more, the log's; what is streamed is one more
while it is copied and sent, and at the shadow as long as the step lasts, with one more on its way. What a layer needs
only while it computes is not in the model, nor is what the process has besides tensors: the same with and without
redundancy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.action import Action, Op
from engine.core.ownership import Ownership, Slot

_STATE = 3  # copies of the weights: themselves, and two moments


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Sizes of one stage: its weights; for a microbatch its residual, output included but not input, and its output."""

    weights: int
    residual: int
    output: int


def peak_bytes(actions: Sequence[Action], worker: int, ownership: Ownership, sizes: Sequence[StageBytes]) -> int:
    """Returns the most bytes that a worker holds while it runs its program of a step; `sizes` are by stage."""
    slots = (*ownership.slots_of(worker), *ownership.shadowed_by(worker))
    streamed: set[Slot] = set()
    held = peak = sum(_STATE * sizes[stage].weights for _, stage in slots)
    for stage, op, microbatch, pipeline in actions:
        size = sizes[stage]
        is_owner = ownership.owner(pipeline, stage) == worker
        gradient = sizes[stage - 1].output if stage > 0 else 0  # of the input, and as large
        received = gradient if stage > 0 and ownership.owner(pipeline, stage - 1) != worker else 0
        if op is Op.F:
            held += size.residual + received
        elif op in (Op.B, Op.I, Op.W):
            held += gradient if op is not Op.W else 0
            if op is not Op.I:
                held += size.weights if microbatch == 0 else 0
                peak = max(peak, held)
                is_last = stage == ownership.grid.stages - 1
                held -= size.residual + received - (0 if is_last else size.output)
        elif op is Op.STREAM:
            peak = max(peak, held + size.weights)
            held += size.weights if not is_owner and (pipeline, stage) not in streamed else 0
            streamed.add((pipeline, stage))
        elif op is Op.LOG and not is_owner:
            held += size.weights
        peak = max(peak, held)
    return peak
