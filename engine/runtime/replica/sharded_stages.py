"""FSDP: each owner of a stage keeps a shard of its weights and optimizer state, and the whole only while it computes.

Rules: torch's `fully_shard` holds the shards and puts them together; gradients are added up and reduced by the engine,
in the order of pipelines, so that no bit changes, and each owner then takes the step of its own shard. A collective of
torch cannot be left before its end: so the owners meet on the data plane first, where a wait ends with the epoch.
Whoever holds shards has nothing that others could go on with: no replica is whole, and a worker that goes ends the run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import Store

from engine.core.action import Action
from engine.core.ownership import Ownership
from engine.runtime.replica.replicas import Replicas
from engine.runtime.stage.optimizer import trainable
from engine.runtime.stage.tensor_shards import suspecting
from engine.runtime.transport.data_plane import DataPlane
from engine.runtime.transport.reduction import Circle
from engine.runtime.transport.tensor_spec import TensorSpec
from engine.runtime.transport.transfers import Purpose

_TIMEOUT = timedelta(seconds=1800)
_TOKEN = TensorSpec((1,), torch.uint8, False)


class Shards:
    """The shards that one worker holds of the stages that it owns."""

    def __init__(self, worker: int, replicas: Replicas, ownership: Ownership, store: Store):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._worker = worker
        self._slots = ownership.slots_of(worker)
        circles = {ownership.owners_of(stage) for _, stage in self._slots}
        assert len(circles) == 1, "the owners of one stage own all their stages together"
        (owners,) = circles
        self._layers: dict[int, list[Any]] = {}
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        with suspecting("joining the other owners"):
            prefixed = distributed.PrefixStore(f"shards-{owners[0]}", store)
            distributed.init_process_group(
                "gloo", store=prefixed, rank=owners.index(worker), world_size=len(owners), timeout=_TIMEOUT
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
        """Takes what the owners meet on."""
        self._plane, self._ownership = plane, ownership

    def meet(self, stage: int) -> None:
        """Waits until all owners of a stage are here; raises Fenced, Stopped or WorkerFailedError as any wait does."""
        circle = Circle(self._plane, self._ownership, self._worker, stage)
        keys = {each: circle.key(Purpose.MEETING, circle.pipelines(each)[0]) for each in (*circle.others, self._worker)}
        for other in circle.others:
            self._plane.post(other, keys[other], (_TOKEN,))
        for other in circle.others:
            self._plane.send(other, keys[self._worker], (torch.zeros(1, dtype=torch.uint8),))
        for other in circle.others:
            self._plane.take(other, keys[other])

    def unshard(self, action: Action, step: int) -> None:
        """Puts the weights of a stage together."""
        self._unshard(action.stage)

    def reshard(self, action: Action, step: int) -> None:
        """Keeps the shard alone."""
        self._reshard(action.stage)

    def _unshard(self, stage: int) -> None:
        self.meet(stage)
        with suspecting("putting a stage together"):
            for layer in self._layers[stage]:
                layer.unshard()

    def _reshard(self, stage: int) -> None:
        for layer in self._layers[stage]:
            layer.reshard()

    @contextlib.contextmanager
    def all_whole(self) -> Iterator[None]:
        """Has every stage that is owned here whole for a while."""
        for _, stage in self._slots:
            self._unshard(stage)
        yield
        for _, stage in self._slots:
            self._reshard(stage)
