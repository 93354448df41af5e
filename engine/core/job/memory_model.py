"""The memory model: the bytes of tensors that a worker holds at most, from the sizes of its stages.

- A replica, owned or shadowed, has weights, optimizer state and buffers. With fsdp it has a shard of the first two, and
  during a step its owner has the whole weights too.
- An owner has accumulators of the gradients, and with several pipelines their mean, which a shadow gets by the log.
- Where another worker can take over, a replica also has the buffers of each pipeline at the last boundary. An owner
  keeps the values for other owners, of each microbatch, until the commit.
- The share of a checkpoint is copied; two copies may wait for the disk.

The model leaves out the residuals inside of layers, sums over tied uses, and memory outside of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from engine.core.action import ADDING_OPS, FORWARD_OPS, LEAVE_OPS, STASH_OPS, Action, Op
from engine.core.checkpoint_rules import keeping_of, shares_of
from engine.core.job.job import Job
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import crosses
from engine.core.value import Kind, Value


class StageBytes(NamedTuple):
    """The sizes of one stage in bytes, as a worker counts them; with fsdp `weights` and `optimizer` are of a shard.

    `whole` are all weights, `trained` those with a gradient; `buffers` are of one pipeline, `output` of a microbatch.
    """

    weights: int
    whole: int
    trained: int
    optimizer: int
    buffers: int
    output: int


class MicrobatchBytes(NamedTuple):
    """The bytes that a microbatch takes on the device of a stage.

    Its `residual` stays from forward to backward, which take `forward` and `backward`; `largest` is the stage's largest
    parameter.
    """

    residual: int
    forward: int
    backward: int
    largest: int


class WorkerBytes(NamedTuple):
    """The bytes of tensors that one worker holds at most, by their purpose."""

    weights: int
    optimizer: int
    gradients: int
    buffers: int
    borders: int
    copies: int


def replica_bytes(size: StageBytes) -> int:
    """Returns the bytes of the state of a slot, which a copy to another worker sends."""
    return size.weights + size.optimizer + size.buffers


def owned_bytes(job: Job, size: StageBytes) -> int:
    """Returns the bytes that an owner of a slot holds at least: its state, the gradients and the kept buffers."""
    gradients = size.trained * (2 if job.pipelines > 1 else 1)
    return replica_bytes(size) + gradients + size.buffers * job.pipelines * job.retains


def worker_bytes(job: Job, ownership: Ownership, worker: int, sizes: Mapping[int, StageBytes]) -> WorkerBytes:
    """Returns the bytes of a worker; `sizes` has those of each stage that it holds."""
    stages = [sizes[stage] for _, stage in ownership.held_by(worker)]
    own = ownership.slots_of(worker)
    means = {stage for _, stage in own} if job.pipelines > 1 else set()
    copied = sum(
        size.weights + size.optimizer + size.buffers * job.pipelines
        for size in (sizes[share.slot[1]] for share in shares_of(ownership, worker))
    )
    return WorkerBytes(
        weights=sum(each.weights for each in stages) + sum(sizes[stage].whole for _, stage in own if job.fsdp),
        optimizer=sum(each.optimizer for each in stages),
        gradients=sum(each.trained for each in stages) + sum(sizes[stage].trained for stage in means),
        buffers=sum(each.buffers for each in stages) * (1 + job.pipelines * job.retains),
        borders=sum(crossing(ownership, own, sizes)) * job.program_microbatches * job.retains,
        copies=copied * _copies(job),
    )


def crossing(ownership: Ownership, own: Iterable[Slot], sizes: Mapping[int, StageBytes]) -> Iterator[int]:
    """Yields the bytes of a microbatch's outputs, and of its gradients, at each border with another owner."""
    for pipeline, stage in own:
        if stage > 0 and crosses(Value(Kind.GRADIENT, pipeline, stage), ownership):
            yield sizes[stage - 1].output  # a gradient is as large as the input
        if stage < ownership.grid.stages - 1 and crosses(Value(Kind.ACTIVATION, pipeline, stage), ownership):
            yield sizes[stage].output


def _copies(job: Job) -> int:
    keeping = keeping_of(job.checkpoint_every)
    if keeping is None or not (keeping.last or keeping.every_steps or keeping.every_ns):
        return 0
    return 2 if keeping.every_steps or keeping.every_ns else 1


# The most bytes of its GPU that a worker takes in a step: a walk over its actions with the sizes of its stages.
#
#     from the start     weights, optimizer state, buffers; the workspaces of matrix products
#     forward            its residual stays; it takes bytes for itself
#     backward           frees the residual, but for an output that stays; the first one makes the gradients
#     end of the step    means over pipelines; the log of a shadow, and a chunk of it on its way; an update
#
# Rules: the sizes are counted, not estimated: those of a microbatch by a trial on the device. Left out are messages
# that come before their use, and memory that a kernel takes inside of itself.

WORKSPACES = 2 * 8 * 4096 * 1024  # of CUBLAS_WORKSPACE_CONFIG, in the thread of forwards and in that of backwards
_CHUNK = 16 << 20  # of a log on its way, at most
_OF_UPDATE = 3  # tensors of a parameter's size that its update takes: the clipped gradient, and two steps of a quotient
_ONE_BY_ONE = ("adamw", "sgd")  # optimizers that update a parameter after the other


def device_bytes(
    job: Job,
    actions: Sequence[Action],
    ownership: Ownership,
    worker: int,
    sizes: Mapping[int, StageBytes],
    tried: Mapping[int, MicrobatchBytes],
) -> int:
    """Returns the most bytes that a worker takes on its GPU in a step, by its actions in order.

    `sizes` are those of its stages and of the one before; `tried` those of a microbatch in each.
    """
    state = worker_bytes(job, ownership, worker, sizes)
    walk = _Walk(job, ownership, worker, sizes, tried)
    walk.run(actions)
    return WORKSPACES + state.weights + state.optimizer + state.buffers + walk.most


class _Walk:
    """The bytes of the open step; `most` are the most so far."""

    def __init__(
        self,
        job: Job,
        ownership: Ownership,
        worker: int,
        sizes: Mapping[int, StageBytes],
        tried: Mapping[int, MicrobatchBytes],
    ):
        self.job, self.ownership, self.sizes, self.tried = job, ownership, sizes, tried
        self.now = self.most = 0
        self._own = frozenset(ownership.slots_of(worker))
        self._shadowed = ownership.shadowed_by(worker)
        self._with_gradients: set[Slot] = set()  # of an owner, or streamed to a shadow
        self._with_means: set[int] = set()
        self._in_parts: set[tuple[int, int, int]] = set()

    def run(self, actions: Sequence[Action]) -> None:
        if self.job.log_every:  # a stream comes long before its shadow takes it
            self._add(sum(min(_CHUNK, self.sizes[stage].trained) for _, stage in self._shadowed))
        self._in_parts = {(each.pipeline, each.stage, each.microbatch) for each in actions if each.op is Op.W}
        for action in actions:
            if action.op in FORWARD_OPS:
                self._add(self.tried[action.stage].residual)
                self._meanwhile(self.tried[action.stage].forward)
            elif action.op in STASH_OPS:
                self._add(self.tried[action.stage].residual * (-1 if action.op in LEAVE_OPS else 1))
            elif action.op in ADDING_OPS or action.op is Op.I:
                self._backward(action)
            else:
                self._end_of_step(action)

    def _end_of_step(self, action: Action) -> None:
        slot, stage = (action.pipeline, action.stage), action.stage
        match action.op:
            case Op.STREAM if slot not in self._own:
                self._make_gradients(slot)
                self._meanwhile(min(_CHUNK, self.sizes[stage].trained))
            case Op.REDUCE_GRAD if self.job.pipelines > 1 and stage not in self._with_means:
                self._with_means.add(stage)
                self._meanwhile(3 * self.sizes[stage].trained)  # flat, the parts of the others, and the mean
                self._add(self.sizes[stage].trained)
            case Op.LOG:
                self._add(0 if slot in self._own else self.sizes[stage].trained)
                self._meanwhile(min(_CHUNK, self.sizes[stage].trained))
            case Op.STEP:
                together = 0 if self.job.optimizer in _ONE_BY_ONE else self.sizes[stage].trained
                self._meanwhile(_OF_UPDATE * self.tried[stage].largest + together)

    def _backward(self, action: Action) -> None:
        slot, tried = (action.pipeline, action.stage), self.tried[action.stage]
        self._meanwhile(tried.backward)  # as if the first one found its gradients: it makes them while it frees
        if action.op is not Op.I or (*slot, action.microbatch) not in self._in_parts:
            self._add(-tried.residual)
        if action.op is not Op.W and self.job.retains and self.job.retain != "cpu":
            self._add(sum(crossing(self.ownership, [slot], self.sizes)))  # until the commit, for other workers
        self._make_gradients(slot)

    def _make_gradients(self, slot: Slot) -> None:
        if slot not in self._with_gradients:
            self._with_gradients.add(slot)
            self._add(self.sizes[slot[1]].trained)

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def _meanwhile(self, num_bytes: int) -> None:
        self.most = max(self.most, self.now + num_bytes)
