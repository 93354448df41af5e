"""The memory model: the bytes of tensors that a worker holds at most, from the sizes of its stages.

- A replica, owned or shadowed, has weights, optimizer state and buffers. With fsdp it has a shard of the first two, and
  in a step its owner has the whole weights too.
- An owner has accumulators of the gradients, and with several pipelines their mean. A shadow receives it by the log.
- Where another worker can take over, a replica also has the buffers of each pipeline at the last boundary. An owner
  keeps the values that go to other owners until the commit, of each microbatch.
- The share of a checkpoint is copied; two copies may wait for the disk.

The model leaves out the residuals inside of layers, sums over tied uses, and memory outside of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from engine.core.checkpoints.keeping import keeping_of, shares_of
from engine.core.config.job import Job
from engine.core.ownership import Ownership, Slot
from engine.core.program.routes import crosses
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

    `residual` bytes stay from its forward to its backward; the two take `forward` and `backward` bytes for themselves.
    `largest` is the largest parameter of the stage.
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
    held = [sizes[stage] for _, stage in ownership.held_by(worker)]
    own = ownership.slots_of(worker)
    means = {stage for _, stage in own} if job.pipelines > 1 else set()
    copied = sum(
        size.weights + size.optimizer + size.buffers * job.pipelines
        for size in (sizes[share.slot[1]] for share in shares_of(ownership, worker))
    )
    return WorkerBytes(
        weights=sum(each.weights for each in held) + sum(sizes[stage].whole for _, stage in own if job.fsdp),
        optimizer=sum(each.optimizer for each in held),
        gradients=sum(each.trained for each in held) + sum(sizes[stage].trained for stage in means),
        buffers=sum(each.buffers for each in held) * (1 + job.pipelines * job.retains),
        borders=sum(_crossing(ownership, own, sizes)) * job.microbatches * job.retains,
        copies=copied * _copies(job),
    )


def _crossing(ownership: Ownership, own: Iterable[Slot], sizes: Mapping[int, StageBytes]) -> Iterator[int]:
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
