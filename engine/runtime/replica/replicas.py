"""The replicas of one worker: of the slots that it owns and of those that it shadows.

Rules: a replica is whole if it has the weights, the optimizer state and the buffers of the last step boundary. A whole
replica of a stage can take over the same stage of any pipeline: weights and optimizer state are equal in all pipelines,
and it has the boundary buffers of all of them. A replica that is not whole waits for its HEAL. With FSDP a replica has
a shard of weights and optimizer state, that of its pipeline, and can take over its own slot only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.core.config.job import Job
from engine.core.errors import Problem, UserError
from engine.core.ownership import Slot
from engine.models.layers import Model
from engine.runtime.device.device import HOST, Device
from engine.runtime.stage.buffers import overwrite
from engine.runtime.stage.stage import Stage
from engine.runtime.stage.tensor_shards import Shard
from engine.runtime.transport.tensor_spec import Border


class Replicas:
    """Replicas by slot; those of `slots` are whole at the start, with initial weights from the job's seed."""

    def __init__(self, job: Job, model: Model, starts: Sequence[int], slots: Iterable[Slot], device: Device = HOST):
        self.device = device
        self.job = job
        self.model = model
        self._starts = tuple(starts)
        self._borders: Sequence[Border] = ()
        self._unfilled: set[Slot] = set()
        self.stages: dict[Slot, Stage] = {slot: self._build(slot) for slot in slots}

    def _build(self, slot: Slot) -> Stage:
        pipeline, stage = slot
        ends = (*self._starts[1:], len(self.model.layers))
        built = Stage(self.job, self.model, pipeline, self._starts[stage], ends[stage], self.device)
        if self._borders:
            self._complete(slot, built)
        return built

    def learn(self, borders: Sequence[Border]) -> None:
        """Sets the border behind the stage of every replica, present and future; `borders` has one per stage.

        With FSDP each keeps its shard from then on. Raises UserError for weights that cannot be cut.
        """
        self._borders = borders
        for slot, replica in self.stages.items():
            self._complete(slot, replica)

    def _complete(self, slot: Slot, replica: Stage) -> None:
        pipeline, stage = slot
        replica.border = self._borders[stage]
        if self.job.fsdp:
            _keep_a_shard(replica, Shard(pipeline, self.job.pipelines))

    def whole(self) -> tuple[Slot, ...]:
        """Returns the slots with a whole replica here, in order; with FSDP it has all that its owner keeps."""
        return tuple(sorted(self.stages.keys() - self._unfilled))

    def adopt(self, slot: Slot) -> None:
        """Builds a replica of a slot at the step boundary from a whole one of the same stage in another pipeline."""
        source = self.stages[next(other for other in self.whole() if other[1] == slot[1] and other != slot)]
        replica = self._build(slot)
        with torch.no_grad():
            for index, optimizer in replica.optimizers.items():
                for name, kept in optimizer.kept.items():
                    kept.copy_(source.optimizers[index].kept[name])
                optimizer.state = {
                    name: {key: tensor.clone() for key, tensor in named.items()}
                    for name, named in source.optimizers[index].state.items()
                }
            for buffer, other in zip(replica.buffers(), source.boundary[slot[0]], strict=True):
                overwrite(buffer, other)
        replica.boundary = source.boundary
        self.stages[slot] = replica
        self._unfilled.discard(slot)

    def await_heal(self, slot: Slot) -> None:
        """Builds an unfilled replica for a slot whose owner will send the state, unless there is one."""
        if slot not in self._unfilled:
            with self.device.waiting():
                self.stages[slot] = self._build(slot)
            self._unfilled.add(slot)

    def healed(self, slot: Slot) -> None:
        """Marks a replica as whole after its HEAL."""
        self._unfilled.remove(slot)

    def drop(self, slot: Slot) -> None:
        """Removes a replica."""
        del self.stages[slot]
        self._unfilled.discard(slot)


def _keep_a_shard(stage: Stage, shard: Shard) -> None:
    """Leaves a replica a shard of its weights, in memory of its own."""
    for index, layer in stage.layers.items():
        for name, parameter in layer.named_parameters():
            if not parameter.is_contiguous():
                hint = f"{name} of {stage.where(index)} has the strides {parameter.stride()}"
                raise UserError([Problem("fsdp", "0 with weights that are not contiguous", repr(stage.job.fsdp), hint)])
            parameter.data = parameter.detach().clone()  # numpy may have seen the first one, which then stays
        stage.optimizers[index].keep(shard)
    free_weights(stage)


def free_weights(stage: Stage) -> None:
    """Frees the memory of the parameters of a replica that keeps a shard of them."""
    for layer in stage.layers.values():
        for parameter in layer.parameters():
            parameter.untyped_storage().resize_(0)
