"""The tensors of a worker by slot and kind, predicted: at the boundary of a step, and at the peak inside of one.

    RECV       in transfer, until the forward or backward takes it
    forward    its residual is in the stash until the backward; the output in it is not counted again
    backward   makes the gradients; what other owners may need is retained until the commit
    end        means over pipelines and logs are in transfer until the optimizer step

Rules: a residual has the size that the trial of its layers found. Left out are snapshots of buffers inside a step,
copies for checkpoints, what a computation takes for itself, and messages that no action has taken yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from engine.core.action import ADDING_OPS, FORWARD_OPS, LEAVE_OPS, RECEIVE_OPS, SHARD_OPS, STASH_OPS, Action, Op
from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes, crossing
from engine.core.ownership import Ownership, Slot


class TensorBytes(NamedTuple):
    """The bytes of tensors that a worker holds for one slot, by kind."""

    weights: int = 0
    moments: int = 0
    buffers: int = 0
    stash: int = 0
    accumulators: int = 0
    retained: int = 0
    transfer: int = 0
    offloaded: int = 0  # of the stash, on the host

    def plus(self, other: TensorBytes) -> TensorBytes:
        """Returns the sums by kind."""
        return TensorBytes(*map(sum, zip(self, other, strict=True)))


BySlot = dict[Slot, TensorBytes]


def residual_of(job: Job, layers: Sequence[int], residuals: Mapping[int, int]) -> int:
    """Returns the bytes of a stage's residual, without its input, by those of its layers; 0 if one is not known."""
    every = job.activation_checkpoint
    stored = [layer for layer in layers if not every or (layer + 1) % every == 0 or layer == layers[-1]]
    return sum(residuals[layer] for layer in stored) if all(layer in residuals for layer in stored) else 0


def predicted_tensors(
    job: Job,
    actions: Sequence[Action],
    ownership: Ownership,
    worker: int,
    sizes: Mapping[int, StageBytes],
    residuals: Mapping[int, int],
) -> tuple[BySlot, BySlot]:
    """Returns the tensors of a worker at the boundary and at the peak of a step with these actions.

    `sizes` are of its stages and the one before, `residuals` the bytes of a microbatch in the stash of each stage.
    """
    copies = 1 + job.pipelines * job.retains
    slots = {slot: sizes[slot[1]] for slot in ownership.held_by(worker)}
    boundary = {
        slot: TensorBytes(weights=size.weights, moments=size.optimizer, buffers=size.buffers * copies)
        for slot, size in slots.items()
    }
    walk = _TensorWalk(job, ownership, worker, sizes, residuals)
    now, most, total = dict(boundary), dict(boundary), 0
    for action in actions:
        slot = (action.pipeline, action.stage)
        for at, more in ((slot, walk.taken(action)), *walk.passed(action)):
            now[at] = now[at].plus(more)
        if (total_now := sum(map(sum, now.values()))) > total:
            most, total = dict(now), total_now
    return boundary, most


class _TensorWalk:
    """What each action of a worker adds to the tensors of its slot."""

    def __init__(
        self, job: Job, ownership: Ownership, worker: int, sizes: Mapping[int, StageBytes], residuals: Mapping[int, int]
    ):
        self.job, self.ownership, self.sizes, self.residuals = job, ownership, sizes, residuals
        self._own = frozenset(ownership.slots_of(worker))
        self._with_gradients: set[Slot] = set()
        self._with_means: set[int] = set()
        self._coming: dict[tuple[Op, Slot, int], int] = {}  # received for an action, and its bytes

    def taken(self, action: Action) -> TensorBytes:
        """Returns the bytes that an action adds, by kind; negative ones that it frees."""
        if action.op in FORWARD_OPS:
            return TensorBytes(stash=self.residuals[action.stage], transfer=-self._used(action, Op.F))
        if action.op in ADDING_OPS or action.op is Op.I:
            return self._backward(action)
        slot = (action.pipeline, action.stage)
        match action.op:
            case op if op in RECEIVE_OPS:
                return TensorBytes(transfer=self._received(action))
            case Op.SEND_B if not self.job.retains:
                return TensorBytes(transfer=-self._sent(action))
            case Op.STREAM if slot not in self._own:
                return TensorBytes(accumulators=self._made(slot))
            case _:
                return self._others(action, slot)

    def passed(self, action: Action) -> Iterator[tuple[Slot, TensorBytes]]:
        """Yields the gradient of a backward whose taker is on this worker too, with the slot of the taker."""
        taker = (action.pipeline, action.stage - 1)
        if (action.op is Op.B or action.op is Op.I) and taker in self._own:
            size = self._coming[Op.B, taker, action.microbatch] = self._sent(action)
            yield taker, TensorBytes(transfer=size)

    def _others(self, action: Action, slot: Slot) -> TensorBytes:
        size, is_new = self.sizes[action.stage], action.stage not in self._with_means
        match action.op:
            case op if op in STASH_OPS:
                leaves = self.residuals[action.stage] * (1 if op in LEAVE_OPS else -1)
                return TensorBytes(stash=-leaves, offloaded=leaves)
            case op if op in SHARD_OPS:
                return TensorBytes(weights=size.whole if action.op is Op.UNSHARD else -size.whole)
            case Op.REDUCE_GRAD if self.job.pipelines > 1 and is_new:
                self._with_means.add(action.stage)
                return TensorBytes(transfer=size.trained)
            case Op.LOG if slot not in self._own or self.job.dtype == "float16":
                return TensorBytes(transfer=size.trained)
            case _:
                return TensorBytes()

    def _received(self, action: Action) -> int:
        is_forward = action.op is Op.RECV_F
        size = self.sizes[action.stage - is_forward].output
        self._coming[Op.F if is_forward else Op.B, (action.pipeline, action.stage), action.microbatch] = size
        return size

    def _used(self, action: Action, by: Op) -> int:
        return self._coming.pop((by, (action.pipeline, action.stage), action.microbatch), 0)

    def _sent(self, action: Action) -> int:
        return self.sizes[action.stage - 1].output if action.stage else 0

    def _made(self, slot: Slot) -> int:
        if slot in self._with_gradients:
            return 0
        self._with_gradients.add(slot)
        return self.sizes[slot[1]].trained

    def _backward(self, action: Action) -> TensorBytes:
        slot, stage = (action.pipeline, action.stage), action.stage
        stash = 0 if action.op is Op.I else -self.residuals[stage]
        accumulators = 0 if action.op is Op.I else self._made(slot)
        num_bytes = self.job.retains * sum(crossing(self.ownership, [slot], self.sizes)) if action.op is not Op.W else 0
        transfer = -self._used(action, Op.B) if action.op is not Op.W else 0
        if action.op is not Op.W and not self.job.retains and (action.pipeline, stage - 1) not in self._own:
            transfer += self._sent(action)
        return TensorBytes(stash=stash, accumulators=accumulators, retained=num_bytes, transfer=transfer)
