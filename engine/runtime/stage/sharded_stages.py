"""FSDP: the replicas of a slot keep its shard of weights and optimizer state; its owner unshards the stage to compute.

    owner of (0, s)   shard 0 ---> whole weights       each sends its shard to all others, and puts theirs beside it
    owner of (1, s)   shard 1 ---> whole weights
    shadow of (0, s)  shard 0                          takes the same optimizer steps, and can take over the slot

Rules: the parameters of a layer stay the same objects, because graphs have them; their memory is there from an unshard
to a reshard only. The engine accumulates and reduces the gradients itself, in pipeline order, so that no bit changes;
then each replica takes the optimizer step of its shard. A gather is messages aside: a new epoch ends it as any wait.
All owners of a stage gather it equally often, and several stages in their order. A worker gathers a stage once for all
pipelines in which it owns it.
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
    """The stages of one worker, in shards: that of a slot has the number of its pipeline."""

    def __init__(self, worker: int, replicas: Replicas):
        self._worker, self._stages = worker, replicas.stages

    def enter(self, plane: Transport, ownership: Ownership) -> None:
        """Sets the plane and the ownership of the next program, which finds all stages in shards."""
        self._channel, self._ownership = plane.aside, ownership
        for replica in self._stages.values():
            free_weights(replica)

    def unshard(self, stage: int) -> None:
        """Gathers the weights of a stage; raises Fenced, Stopped or TransferFailedError as any wait does."""
        own = self._own(stage).values()
        for parameter in (each for replica in own for each in _parameters(replica)):
            parameter.untyped_storage().resize_(parameter.nbytes)
        kept = [[each for optimizer in one.optimizers.values() for each in optimizer.kept.values()] for one in own]
        # The data, without its count of changes: a graph from before a reshard finds the weights unchanged.
        self._gather(stage, kept, [[each.data for each in _parameters(one)] for one in own])

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
        """Yields the row of each layer of the stages that are owned here, whole, with each pipeline of it.

        The open step may have begun; buffers that it has changed have no row, unless those of the boundary are kept.
        All workers must call it; raises as `unshard` does.
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
        kept = [[tensor for _, tensor in each.state_tensors()] for each in optimizers]
        cut = [at for at, (here, (_, there)) in enumerate(zip(kept[0], whole, strict=True)) if here is not there]
        self._gather(stage, [[each[at] for at in cut] for each in kept], [[whole[at][1] for at in cut]])
        return whole

    def _gather(self, stage: int, kept: Sequence[Sequence[Tensor]], copies: Sequence[Sequence[Tensor]]) -> None:
        """Puts all shards of some tensors of a stage into each of some whole `copies`; `kept` are the shards here."""
        ownership, channel, worker = self._ownership, self._channel, self._worker
        shards = [Shard(each, ownership.grid.pipelines) for each in range(ownership.grid.pipelines)]
        keys = [aside_key(ownership.grid, AsidePurpose.SHARD, each.number, stage) for each in shards]
        specs = [[TensorSpec.of(each.of(whole)).as_gradient() for whole in copies[0]] for each in shards]
        owners = [ownership.owner(each.number, stage) for each in shards]
        others = [each for each in ownership.owners_of(stage) if each != worker]
        for owner, key, spec in zip(owners, keys, specs, strict=True):
            if owner != worker:
                post_bulk(channel, owner, key, spec)
        here = dict(zip(ownership.pipelines_of(worker, stage), kept, strict=True))
        for number, tensors in here.items():
            send_bulk(channel, others, keys[number], tensors)
        for shard, owner, key, spec in zip(shards, owners, keys, specs, strict=True):
            is_here = owner == worker
            found = enumerate(here[shard.number]) if is_here else arriving(channel, owner, key, spec, is_posted=True)
            for index, tensor in found:
                for whole in copies:
                    shard.of(whole[index]).copy_(tensor)

    def _own(self, stage: int) -> Mapping[int, Stage]:
        """Returns the replicas of a stage that are owned here, by pipeline."""
        return {each: self._stages[each, stage] for each in self._ownership.pipelines_of(self._worker, stage)}


def _parameters(stage: Stage) -> list[nn.Parameter]:
    return [each for layer in stage.layers.values() for each in layer.parameters()]
