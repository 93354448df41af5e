"""The replicas of one worker: of the slots that it owns, and of those that it shadows.

Rules: a replica is whole if it has the weights, the optimizer state and the buffers of the last step boundary. A whole
replica of a stage can take over the same stage of any pipeline: weights and optimizer state are equal in all pipelines,
and it has the boundary buffers of all of them. A replica that is not whole waits for its HEAL. With FSDP a replica has
only its pipeline's shard of the weights and optimizer state, and can take over only its own slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.codec.values import cut
from engine.core.errors import Problem, UserError
from engine.core.job.job import Job
from engine.core.message_kinds import CUT
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import crosses
from engine.core.value import Value
from engine.models.layers import Model, Tensors
from engine.runtime.device.copies import Leaving, ToHost
from engine.runtime.device.device import HOST, Device
from engine.runtime.stage.buffers import named_copies, overwrite
from engine.runtime.stage.class_optimizer import cloned
from engine.runtime.stage.stage import Stage, cut_off
from engine.runtime.stage.state_hash import MarkedHash, Shard, marked_hash
from engine.runtime.transport.transport import Border

_MARKS_PER_ROW, _MOST_OF_NAME = 100, 300  # bytes of the name of a tensor; a row must fit into a message


def hash_rows(replica: Stage, device: Device, inside_of: int | None = None) -> Iterator[Any]:
    """Yields the hashes of each layer of a replica at a step boundary, as a worker reports them.

    The next step may have begun in a pipeline, `inside_of`: then the buffers are those that are kept of the boundary,
    if any are.
    """
    copies = {}
    if inside_of is not None and replica.boundary:
        copies = named_copies(replica.layers, replica.boundary[inside_of])
    for layer, module in replica.layers.items():
        with device.waiting():
            buffers = copies.get(layer) or module.named_buffers()
            yield row_of(layer, buffers, marked_hash(replica.optimizers[layer].state_tensors()))


def row_of(layer: int, buffers: Iterable[tuple[str, Tensor]], state: MarkedHash) -> Any:
    """Returns the row of a layer whose weights and optimizer state have this hash."""
    (of_state, marks), (of_buffers, marks_of_buffers) = state, marked_hash(buffers)
    return layer, of_state, of_buffers, _short(marks), _short(marks_of_buffers)


def _short(marks: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Returns the first marks of a layer, cut to fit into a message: they only explain a difference."""
    return tuple((cut(name, _MOST_OF_NAME, CUT), mark) for name, mark in marks[:_MARKS_PER_ROW])


# The value store of a worker: activations and gradients of the open step by name, kept across epochs.
#
# Rules: a value for another owner stays until the commit if another worker can take over a slot. Any other value stays
# until its use: a worker keeps its slots for the rest of the step, so a value between two of them is not needed again,
# and a worker that dies loses both. Values never change in place.
#
# With `on_host`, a value that stays is moved to pinned host memory once it has been sent. Messages over the host are
# sent from the same memory; messages between GPUs are sent from the device. Using such a value copies it back.


class ValueStore:
    """Activations and gradients of the open step; with `keeps`, those for other owners stay until the commit."""

    def __init__(self, keeps: bool, device: Device = HOST, *, on_host: bool = False):
        self._keeps, self._device, self._on_host = keeps, device, on_host
        self._tensors: dict[Value, Leaving] = {}
        self._lasting: set[Value] = set()

    def enter(self, ownership: Ownership) -> None:
        """Sets the ownership of the next program."""
        self._ownership = ownership

    def make(self, value: Value, tensors: Tensors) -> None:
        """Stores a value computed here, detached from its autograd graph."""
        self._tensors[value] = cut_off(tensors)
        if self._keeps and crosses(value, self._ownership):
            self._lasting.add(value)

    def receive(self, value: Value, tensors: Tensors) -> None:
        """Stores a received value."""
        self._tensors[value] = tensors

    def consume(self, value: Value) -> Tensors:
        """Returns a value to the one action of this worker that consumes it."""
        tensors = self._tensors[value] if value in self._lasting else self._tensors.pop(value)
        return self._device.put_all(tensors) if isinstance(tensors, ToHost) else tensors

    def to_send(self, value: Value) -> Leaving:
        """Returns a value for a SEND."""
        return self._tensors[value] if self._keeps else self._tensors.pop(value)

    def sent(self, value: Value, leaving: Leaving) -> None:
        """Stores a value as it was sent, from the host or from the device."""
        if self._on_host and value in self._lasting:
            self._tensors[value] = self._device.copies.fetched(leaving)

    def values(self) -> tuple[Value, ...]:
        """Returns the names of the stored values, in order."""
        return tuple(sorted(self._tensors))

    def held(self) -> Iterator[tuple[Value, Leaving, bool]]:
        """Yields each value with its tensors, and whether it stays for other owners until the commit."""
        return ((value, tensors, value in self._lasting) for value, tensors in self._tensors.items())

    def clear(self) -> None:
        """Drops all values, after the commit of the step."""
        self._tensors.clear()
        self._lasting.clear()


class Replicas:
    """Replicas by slot; those of `slots` are whole at the start, with initial weights from the job's seed."""

    def __init__(self, job: Job, model: Model, starts: Sequence[int], slots: Iterable[Slot], device: Device = HOST):
        self.device = device
        self.job = job
        self.model = model
        self._starts = tuple(starts)
        self._borders: Sequence[Border] = ()
        self._unfilled: set[Slot] = set()
        self.residuals: dict[int, tuple[int, int]] = {}  # bytes of a residual and of its input, by layer, if tried
        self.stages: dict[Slot, Stage] = {slot: self._build(slot) for slot in slots}

    def _build(self, slot: Slot) -> Stage:
        pipeline, stage = slot
        ends = (*self._starts[1:], len(self.model.layers))
        built = Stage(self.job, self.model, pipeline, self._starts[stage], ends[stage], self.device)
        if self._borders:
            self._complete(slot, built)
        return built

    def learn(self, borders: Sequence[Border]) -> None:
        """Sets the border behind the stage of every replica, current and future; `borders` has one per stage.

        With FSDP each replica keeps only its shard from then on. Raises UserError for weights that cannot be sharded.
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
        """Returns the slots with a whole replica here, in order; with FSDP, with all that its owner keeps."""
        return tuple(sorted(self.stages.keys() - self._unfilled))

    def adopt(self, slot: Slot) -> None:
        """Builds a replica of a slot at the step boundary from a whole one of the same stage in another pipeline."""
        source = self.stages[next(other for other in self.whole() if other[1] == slot[1] and other != slot)]
        replica = self._build(slot)
        with torch.no_grad():
            for index, optimizer in replica.optimizers.items():
                for name, weight in optimizer.kept.items():
                    weight.copy_(source.optimizers[index].kept[name])
                optimizer.state = {name: cloned(state) for name, state in source.optimizers[index].state.items()}
            for buffer, other in zip(replica.buffers(), source.boundary[slot[0]], strict=True):
                overwrite(buffer, other)
        replica.boundary = source.boundary
        self.stages[slot] = replica
        self._unfilled.discard(slot)

    def await_heal(self, slot: Slot) -> None:
        """Builds an empty replica for a slot whose owner will send the state, unless there is one."""
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
    for index, layer in stage.layers.items():
        for name, parameter in layer.named_parameters():
            if not parameter.is_contiguous():
                hint = f"{name} of {stage.where(index)} has the strides {parameter.stride()}"
                raise UserError([Problem("fsdp", "0 with weights that are not contiguous", repr(stage.job.fsdp), hint)])
            parameter.data = parameter.detach().clone()  # numpy may hold on to the old memory
        stage.optimizers[index].keep(shard)
    free_weights(stage)


def free_weights(stage: Stage) -> None:
    """Frees the memory of the parameters of a replica that keeps a shard of them."""
    for layer in stage.layers.values():
        for parameter in layer.parameters():
            parameter.untyped_storage().resize_(0)
