"""FSDP: each owner of a stage keeps a shard of its weights and optimizer state; it unshards the stage to compute.

Rules: torch's `fully_shard` holds and gathers the shards. The engine accumulates and reduces the gradients itself, in
pipeline order, so that no bit changes; then each owner takes the optimizer step of its shard. A torch collective cannot
be aborted. The owners therefore first meet at a barrier, where a new epoch ends the wait. No worker
can take over from a shard: no replica is whole, and the loss of a worker ends the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from engine.core.errors import ensure
from engine.core.ownership import Ownership
from engine.runtime.replica.replicas import Replicas
from engine.runtime.stage.optimizer import trainable
from engine.runtime.transport.suspicion import suspecting
from engine.runtime.transport.tensor_spec import TensorSpec
from engine.runtime.transport.transfer_key import AsidePurpose, aside_key
from engine.runtime.transport.transport import Transport, TransportBackend

_TOKEN = TensorSpec((1,), torch.uint8, False)


class ShardedStages:
    """The shards of one worker: one of each stage that it owns."""

    def __init__(self, worker: int, replicas: Replicas, ownership: Ownership, backend: TransportBackend):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._worker = worker
        self._slots = ownership.slots_of(worker)
        circles = {ownership.owners_of(stage) for _, stage in self._slots}
        ensure(len(circles) == 1, "the owners of one stage own all their stages together")
        (owners,) = circles
        self._layers: dict[int, list[Any]] = {}
        backend.open_collectives(f"shards-{owners[0]}", owners)
        with suspecting("joining the other owners"):
            mesh = init_device_mesh("cpu", (len(owners),))
            for slot in self._slots:
                stage = replicas.stages[slot]
                layers: list[Any] = [layer for layer in stage.layers.values() if any(True for _ in layer.parameters())]
                for layer in layers:
                    with _without_new_hooks(layer):
                        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
                    layer.unshard()
                stage.weights = {index: dict(trainable(layer)) for index, layer in stage.layers.items()}
                stage.forget_step()
                for layer in layers:
                    layer.reshard()
                self._layers[slot[1]] = layers

    def enter(self, plane: Transport, ownership: Ownership) -> None:
        """Sets the plane and the ownership of the next epoch."""
        self._channel, self._ownership = plane.aside, ownership

    def meet(self, stage: int) -> None:
        """Barrier of all owners of a stage; raises Fenced, Stopped or TransferFailedError as any wait does."""
        ownership, channel = self._ownership, self._channel
        keys = {
            each: aside_key(ownership.grid, AsidePurpose.MEETING, ownership.pipelines_of(each, stage)[0], stage)
            for each in ownership.owners_of(stage)
        }
        own_key = keys.pop(self._worker)
        for other, key in keys.items():
            channel.post(other, key, (_TOKEN,))
        for other in keys:
            channel.send(other, own_key, (torch.zeros(1, dtype=torch.uint8, device="cpu"),))
        for other, key in keys.items():
            channel.take(other, key)

    def unshard(self, stage: int) -> None:
        """Gathers the weights of a stage; raises as `meet` does."""
        self.meet(stage)
        with suspecting("putting a stage together"):
            for layer in self._layers[stage]:
                layer.unshard()

    def reshard(self, stage: int) -> None:
        """Frees the gathered weights of a stage."""
        for layer in self._layers[stage]:
            layer.reshard()

    @contextlib.contextmanager
    def all_whole(self) -> Iterator[None]:
        """Keeps all stages that this worker owns unsharded during the block."""
        for _, stage in self._slots:
            self.unshard(stage)
        yield
        for _, stage in self._slots:
            self.reshard(stage)


@contextlib.contextmanager
def _without_new_hooks(layer: nn.Module) -> Iterator[None]:
    """Takes away the hooks that the block registers around the forward of a layer.

    Those of `fully_shard` gather the weights, which the engine does itself. They also give zeros to an input without a
    gradient: earlier layers would be trained that are not trained without shards.
    """
    hooks: tuple[dict[int, Any], ...] = (layer._forward_pre_hooks, layer._forward_hooks)
    before = [set(each) for each in hooks]
    yield
    for each, known in zip(hooks, before, strict=True):
        for key in each.keys() - known:
            del each[key]
