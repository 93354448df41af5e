"""FSDP: each owner of a stage keeps a shard of its weights and optimizer state; it unshards the stage to compute.

Rules: torch's `fully_shard` holds and gathers the shards. The engine accumulates and reduces the gradients itself, in
pipeline order, so that no bit changes; then each owner takes the optimizer step of its shard. A torch collective cannot
be aborted. The owners therefore first meet at a barrier on the data plane, where a new epoch ends the wait. No worker
can take over from a shard: no replica is whole, and the loss of a worker ends the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import Store

from engine.core.errors import ensure
from engine.core.ownership import Ownership
from engine.runtime.replica.replicas import Replicas
from engine.runtime.stage.optimizer import trainable
from engine.runtime.transport.data_plane import DataPlane, suspecting
from engine.runtime.transport.pair_guard import UNGUARDED, PairGuard
from engine.runtime.transport.reduction import ReduceGroup
from engine.runtime.transport.tensor_spec import TensorSpec
from engine.runtime.transport.transfers import Purpose

_TIMEOUT = timedelta(seconds=1800)
_BACKEND = "guarded"  # the name by which torch calls for a group
_TOKEN = TensorSpec((1,), torch.uint8, False)


class ShardedStages:
    """The shards of one worker: one of each stage that it owns."""

    def __init__(
        self, worker: int, replicas: Replicas, ownership: Ownership, store: Store, guard: PairGuard = UNGUARDED
    ):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._worker = worker
        self._slots = ownership.slots_of(worker)
        circles = {ownership.owners_of(stage) for _, stage in self._slots}
        ensure(len(circles) == 1, "the owners of one stage own all their stages together")
        (owners,) = circles
        self._layers: dict[int, list[Any]] = {}

        def guarded(its_store: Store, rank: int, size: int, timeout: timedelta) -> Any:
            return guard.form(its_store, f"shards-{owners[0]}", worker, owners, timeout.total_seconds()).gloo

        distributed.Backend.register_backend(_BACKEND, guarded, devices=["cpu"])
        with suspecting("joining the other owners"):
            prefixed = distributed.PrefixStore(f"shards-{owners[0]}", store)
            distributed.init_process_group(
                _BACKEND, store=prefixed, rank=owners.index(worker), world_size=len(owners), timeout=_TIMEOUT
            )
            mesh = init_device_mesh("cpu", (len(owners),))
            for slot in self._slots:
                stage = replicas.stages[slot]
                layers: list[Any] = [layer for layer in stage.layers.values() if any(True for _ in layer.parameters())]
                for layer in layers:
                    fully_shard(layer, mesh=mesh, reshard_after_forward=False)
                    layer.set_requires_gradient_sync(False)
                    layer.set_reshard_after_backward(False)
                    layer.unshard()
                stage.weights = {index: dict(trainable(layer)) for index, layer in stage.layers.items()}
                stage.forget_step()
                for layer in layers:
                    layer.reshard()
                self._layers[slot[1]] = layers

    def enter(self, plane: DataPlane, ownership: Ownership) -> None:
        """Sets the data plane and the ownership of the next epoch."""
        self._plane, self._ownership = plane, ownership

    def meet(self, stage: int) -> None:
        """Barrier of all owners of a stage; raises Fenced, Stopped or TransferFailedError as any wait does."""
        group = ReduceGroup(self._plane, self._ownership, self._worker, stage)
        keys = {each: group.key(Purpose.MEETING, group.pipelines(each)[0]) for each in (*group.others, self._worker)}
        for other in group.others:
            self._plane.post(other, keys[other], (_TOKEN,))
        for other in group.others:
            self._plane.send(other, keys[self._worker], (torch.zeros(1, dtype=torch.uint8),))
        for other in group.others:
            self._plane.take(other, keys[other])

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
