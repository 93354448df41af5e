"""FSDP: the replicas of a slot keep its shard of weights and optimizer state; its owner unshards the stage to compute.

    owner of (0, s)   shard 0 ---> whole weights       each sends its shard to all others
    owner of (1, s)   shard 1 ---> whole weights
    shadow of (0, s)  shard 0                          takes the same optimizer steps, and can take over the slot

Rules: the parameters of a layer stay the same objects, because graphs refer to them; they have memory only between an
unshard and the next reshard. The engine itself accumulates and reduces the gradients, in pipeline order, so no bit
changes; then each replica takes the optimizer step of its shard. A gather uses messages aside, and a new epoch ends it
like any wait. All owners of a stage gather it equally often, and gather several stages in order. A worker gathers a
stage once for all pipelines in which it owns it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from engine.core.ownership import Ownership
from engine.runtime.stage.buffers import named_copies
from engine.runtime.stage.replicas import Replicas, free_weights, row_of
from engine.runtime.stage.stage import Stage
from engine.runtime.stage.state_hash import Shard, marked_hash
from engine.runtime.transport.transfers import arriving, post_bulk, send_bulk
from engine.runtime.transport.transport import AsidePurpose, TensorSpec, Transport, aside_key


class ShardedStages:
    """The stages of one worker in shards, each numbered by its pipeline."""

    def __init__(self, worker: int, replicas: Replicas):
        self._worker, self._stages = worker, replicas.stages

    def enter(self, plane: Transport, ownership: Ownership) -> None:
        """Sets the plane and the ownership of the next program, at whose start all stages are in shards."""
        self._channel, self._ownership = plane.aside, ownership
        for replica in self._stages.values():
            free_weights(replica)

    def unshard(self, stage: int) -> None:
        """Gathers the weights of a stage; raises Fenced, Stopped or TransferFailedError like any wait."""
        own = self._own(stage).values()
        for replica in own:
            for parameter in _parameters(replica):
                parameter.untyped_storage().resize_(parameter.nbytes)
        shards = [[part for optimizer in one.optimizers.values() for part in optimizer.kept.values()] for one in own]
        # `data` has no version counter: a graph from before a reshard finds the weights unchanged.
        self._gather(stage, shards, [[parameter.data for parameter in _parameters(replica)] for replica in own])

    def reshard(self, stage: int) -> None:
        """Frees the gathered weights of a stage."""
        for replica in self._own(stage).values():
            free_weights(replica)

    @contextlib.contextmanager
    def all_whole(self) -> Iterator[None]:
        """Keeps all stages that this worker owns unsharded during the block."""
        for stage in self._owned():
            self.unshard(stage)
        yield
        for stage in self._owned():
            self.reshard(stage)

    def hash_rows(self) -> Iterator[tuple[int, Any]]:
        """Yields (pipeline, hashes) of each layer of the stages owned here, unsharded.

        The open step may have begun; buffers that it has changed are left out, unless those of the boundary are kept.
        All workers must call it; raises like `unshard`.
        """
        for stage in self._owned():
            own = self._own(stage)
            for layer in next(iter(own.values())).layers:
                state = marked_hash(self._whole_state(stage, layer))
                for pipeline, replica in own.items():
                    if replica.boundary:
                        buffers = named_copies(replica.layers, replica.boundary[pipeline])[layer]
                        yield pipeline, row_of(layer, buffers, state)
                    elif not replica.counted:
                        yield pipeline, row_of(layer, replica.layers[layer].named_buffers(), state)

    def _owned(self) -> list[int]:
        return sorted({stage for _, stage in self._ownership.slots_of(self._worker)})

    def _whole_state(self, stage: int, layer: int) -> list[tuple[str, Tensor]]:
        """Gathers the weights and the optimizer state of one layer, in the order of their hashes."""
        optimizers = [replica.optimizers[layer] for replica in self._own(stage).values()]
        whole = list(optimizers[0].whole_tensors())
        shards = [[tensor for _, tensor in optimizer.state_tensors()] for optimizer in optimizers]
        cut = [at for at, (here, (_, there)) in enumerate(zip(shards[0], whole, strict=True)) if here is not there]
        self._gather(stage, [[tensors[at] for at in cut] for tensors in shards], [[whole[at][1] for at in cut]])
        return whole

    def _gather(self, stage: int, own: Sequence[Sequence[Tensor]], copies: Sequence[Sequence[Tensor]]) -> None:
        """Fills whole `copies` of some tensors of a stage with all of their shards; `own` are the shards here."""
        ownership, channel, worker = self._ownership, self._channel, self._worker
        shards = [Shard(number, ownership.grid.pipelines) for number in range(ownership.grid.pipelines)]
        keys = [aside_key(ownership.grid, AsidePurpose.SHARD, shard.number, stage) for shard in shards]
        specs = [[TensorSpec.of(shard.of(whole)).as_gradient() for whole in copies[0]] for shard in shards]
        owners = [ownership.owner(shard.number, stage) for shard in shards]
        others = [owner for owner in ownership.owners_of(stage) if owner != worker]
        for owner, key, spec in zip(owners, keys, specs, strict=True):
            if owner != worker:
                post_bulk(channel, owner, key, spec)
        here = dict(zip(ownership.pipelines_of(worker, stage), own, strict=True))
        for number, tensors in here.items():
            send_bulk(channel, others, keys[number], tensors)
        for shard, owner, key, spec in zip(shards, owners, keys, specs, strict=True):
            is_here = owner == worker
            parts = enumerate(here[shard.number]) if is_here else arriving(channel, owner, key, spec, is_posted=True)
            for index, tensor in parts:
                for whole in copies:
                    shard.of(whole[index]).copy_(tensor)

    def _own(self, stage: int) -> Mapping[int, Stage]:
        """Returns the replicas of a stage owned here, by pipeline."""
        pipelines = self._ownership.pipelines_of(self._worker, stage)
        return {pipeline: self._stages[pipeline, stage] for pipeline in pipelines}


def _parameters(stage: Stage) -> list[nn.Parameter]:
    return [parameter for layer in stage.layers.values() for parameter in layer.parameters()]
