"""The memory model: the peak bytes of tensors of a worker in a step, from its program and the sizes of its stages.

Each rule is a line of `peak_bytes`:
- A replica, owned or shadowed, has the weights and the two moments of AdamW.
- A forward adds its residual, and its input if that came from another worker.
- A backward (if split, its part for the weights) frees both. The output of the forward and the gradient of the input
  stay until the commit, for a recovery. The first backward adds the accumulator.
- The residual of a redundant forward stays until the commit.
- A shadow receives the gradients of the log, as large as the weights. A streamed accumulator takes as much: at the
  owner while it is copied and sent, at the shadow until the end of the step, and once more in flight.

The model leaves out temporary memory inside a layer and memory of the process that is not in tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.action import Action, Op
from engine.core.ownership import Ownership, Slot

_STATE = 3  # the weights and two moments


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Sizes of one stage: its weights; per microbatch its residual (with output, without input) and its output."""

    weights: int
    residual: int
    output: int


def peak_bytes(actions: Sequence[Action], worker: int, ownership: Ownership, sizes: Sequence[StageBytes]) -> int:
    """Returns the peak bytes of a worker that runs `actions`, its program of a step; `sizes[stage]` are of a stage."""
    slots = (*ownership.slots_of(worker), *ownership.shadowed_by(worker))
    streamed: set[Slot] = set()
    held = peak = sum(_STATE * sizes[stage].weights for _, stage in slots)
    for stage, op, microbatch, pipeline in actions:
        size = sizes[stage]
        is_owner = ownership.owner(pipeline, stage) == worker
        gradient = sizes[stage - 1].output if stage > 0 else 0  # has the size of the input
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
