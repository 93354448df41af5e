"""The replicas that one worker holds: of the slots it owns, and of those it shadows.

Rules: a replica is whole when it has the weights, the optimizer state and the buffers of the last step boundary. A
whole replica of a stage can stand for the same stage of any pipeline: weights and optimizer state are equal over
pipelines, and it holds the buffers of all of them as of the boundary. An unfilled one waits to be healed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.core.config.job import Job
from engine.core.ownership import Slot
from engine.models.layers import Model
from engine.runtime.stage.buffers import overwrite
from engine.runtime.stage.stage import Stage
from engine.runtime.transport.tensor_spec import Border


class Replicas:
    """Replicas by slot; those of `slots` begin whole, with the weights that the job's seed gives to everybody."""

    def __init__(self, job: Job, model: Model, starts: Sequence[int], slots: Iterable[Slot]):
        self.job = job
        self.model = model
        self._starts = tuple(starts)
        self._borders: Sequence[Border] = ()
        self._unfilled: set[Slot] = set()
        self.stages: dict[Slot, Stage] = {slot: self._build(slot) for slot in slots}

    def _build(self, slot: Slot) -> Stage:
        pipeline, stage = slot
        ends = (*self._starts[1:], len(self.model.layers))
        built = Stage(self.job, self.model, pipeline, self._starts[stage], ends[stage])
        built.border = self._borders[stage] if self._borders else None
        return built

    def learn(self, borders: Sequence[Border]) -> None:
        """Tells every replica, of today and of later, what crosses the border behind its stage."""
        self._borders = borders
        for (_, stage), replica in self.stages.items():
            replica.border = borders[stage]

    def whole(self) -> tuple[Slot, ...]:
        """Returns the slots of which this worker holds the state as of the last step boundary, in order: not shards."""
        if self.job.fsdp:
            return ()
        return tuple(sorted(self.stages.keys() - self._unfilled))

    def adopt(self, slot: Slot) -> None:
        """Builds a replica of a slot from a whole one of the same stage in another pipeline, as of the boundary."""
        source = self.stages[next(other for other in self.whole() if other[1] == slot[1] and other != slot)]
        replica = self._build(slot)
        with torch.no_grad():
            for index, layer in replica.layers.items():
                for name, parameter in layer.named_parameters():
                    parameter.copy_(source.layers[index].get_parameter(name))
                replica.optimizers[index].state = {
                    name: {key: tensor.clone() for key, tensor in named.items()}
                    for name, named in source.optimizers[index].state.items()
                }
            for buffer, other in zip(replica.buffers(), source.boundary[slot[0]], strict=True):
                overwrite(buffer, other)
        replica.boundary = source.boundary
        self.stages[slot] = replica
        self._unfilled.discard(slot)

    def await_heal(self, slot: Slot) -> None:
        """Makes place for a replica that its owner will send, if it is not made yet."""
        if slot not in self._unfilled:
            self.stages[slot] = self._build(slot)
            self._unfilled.add(slot)

    def healed(self, slot: Slot) -> None:
        """Notes that a replica has been filled."""
        self._unfilled.remove(slot)

    def drop(self, slot: Slot) -> None:
        """Lets a replica go."""
        del self.stages[slot]
        self._unfilled.discard(slot)
