"""The log: the owner of a slot sends its shadows the inputs of the optimizer step, not the new state.

Rules: each replica that applies the entry of a step gets the same bits. An entry therefore has the reduced gradients;
the clip factor follows with the commit. It has the buffers and losses of every pipeline, because a replica may take
over the same stage of another pipeline. An entry counts only if the owners of all slots of a stage, and of stages tied
to it, hold it; otherwise the step end is made again from the accumulators: 2 % more tasks, and no mixtures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from engine.core.action import Action, Op
from engine.core.job.job import Job
from engine.core.job.torch_parts import inverse_of
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import Routes
from engine.core.value import Kind, Value
from engine.models.layers import Tensors
from engine.runtime.device.missing_gradients import look_at
from engine.runtime.stage.buffers import BufferSnapshot, overwrite
from engine.runtime.stage.replicas import Replicas
from engine.runtime.stage.stage import Stage
from engine.runtime.transport.transfers import post_bulk, receive_bulk, send_bulk
from engine.runtime.transport.transport import (
    AsideKey,
    AsidePurpose,
    Channel,
    ProgramKey,
    TensorSpec,
    Transport,
    aside_key,
    laid_out_as,
)

Gradients = Mapping[int, Mapping[str, Tensor]]  # by layer and name


@dataclass(frozen=True, slots=True)
class LogEntry:
    """The log entry of one slot in one step. `losses` is empty except on the last stage."""

    gradients: Gradients
    buffers: tuple[Tensors, ...]  # of each pipeline
    losses: tuple[Tensors, ...]  # of each pipeline: one tensor with the loss of each microbatch

    def tensors(self) -> Iterator[Tensor]:
        """Yields all tensors in the order of sending."""
        yield from (gradient for named in self.gradients.values() for gradient in named.values())
        yield from (tensor for part in (*self.buffers, *self.losses) for tensor in part)

    def norms(self, skipped: Collection[tuple[int, str]]) -> list[tuple[int, float]]:
        """Returns (layer, squared norm of its gradient) for each layer, without the parameters `skipped`."""
        norms = [
            (layer, torch.linalg.vector_norm(gradient, dtype=torch.float64))
            for layer, named in self.gradients.items()
            for name, gradient in named.items()
            if (layer, name) not in skipped
        ]
        totals = dict.fromkeys(self.gradients, 0.0)
        if norms:  # one wait for the device
            for (layer, _), norm in zip(norms, torch.stack([norm for _, norm in norms]).tolist(), strict=True):
                totals[layer] += norm**2
        return list(totals.items())

    def loss(self, pipeline: int) -> float | None:
        """Returns the training loss of one pipeline, or None; `fmean`, as `sum` differs between Python versions."""
        losses = self.losses[pipeline][0].tolist() if self.losses else []
        if not all(map(math.isfinite, losses)):
            return sum(losses) / len(losses)  # `fmean` refuses two infinities
        return fmean(losses) if losses else None


def losses_of(stage: Stage) -> Tensors:
    """Returns the losses of the step as one float64 tensor of shape (M,); nothing except on the last stage."""
    if not stage.is_last:
        return ()
    losses = [loss for _, loss in sorted(stage.losses.items())]
    return (stage.device.put(torch.tensor(losses, dtype=torch.float64, device="cpu")),)


def laid_out(stage: Stage, gradients: Iterable[Tensor]) -> Gradients:
    """Returns gradients by layer and name, each with the strides of its parameter: strides can decide bits."""
    rest = iter(gradients)
    return {
        index: {name: laid_out_as(parameter, next(rest)) for name, parameter in named.items()}
        for index, named in stage.weights.items()
    }


def unscaled(gradients: Gradients, scale: float) -> Gradients:
    """Returns the gradients divided by the scale of the loss."""
    inverse = inverse_of(scale)
    return {layer: {name: each * inverse for name, each in named.items()} for layer, named in gradients.items()}


def send_entry(channel: Channel[ProgramKey], targets: Iterable[int], key: ProgramKey, entry: LogEntry) -> None:
    """Sends an entry to the shadows of its slot."""
    send_bulk(channel, targets, key, list(entry.tensors()))


def post_entry(channel: Channel[ProgramKey], source: int, key: ProgramKey, stage: Stage) -> bool:
    """Posts the receive of a log entry ahead of `take_entry`; returns whether the entry is one message."""
    return post_bulk(channel, source, key, [spec for part in _specs_of(stage) for spec in part])


def take_entry(
    channel: Channel[ProgramKey], source: int, key: ProgramKey, stage: Stage, is_posted: bool = False
) -> LogEntry:
    """Waits for the log entry of the slot that `stage` is a replica of, and returns it."""
    pipelines = stage.job.pipelines
    gradients, buffers, losses = specs = _specs_of(stage)
    arrived = iter(receive_bulk(channel, source, key, [spec for part in specs for spec in part], is_posted))
    return LogEntry(
        laid_out(stage, [next(arrived) for _ in gradients]),
        _in_parts(tuple(next(arrived) for _ in buffers), pipelines),
        _in_parts(tuple(next(arrived) for _ in losses), pipelines) if losses else (),
    )


def _specs_of(stage: Stage) -> tuple[list[TensorSpec], list[TensorSpec], list[TensorSpec]]:
    gradients = [TensorSpec.of(parameter).as_gradient() for parameter in stage.trained()]
    buffers = [TensorSpec.of(buffer) for buffer in stage.buffers()]
    losses = [TensorSpec((stage.job.program_microbatches,), torch.float64, False)] if stage.is_last else []
    return gradients, buffers * stage.job.pipelines, losses * stage.job.pipelines


def _in_parts(tensors: Tensors, num_parts: int) -> tuple[Tensors, ...]:
    size = len(tensors) // num_parts
    return tuple(tensors[size * part : size * (part + 1)] for part in range(num_parts))


def take_step(stage: Stage, entry: LogEntry, learning_rate: float, clip_factor: float) -> None:
    """Takes the optimizer step of a replica from its log entry, and sets its buffers to the logged ones."""
    look_at(gradient for named in entry.gradients.values() for gradient in named.values())
    for index, optimizer in stage.optimizers.items():
        optimizer.step(learning_rate, entry.gradients[index], clip_factor)
    with torch.no_grad():
        for buffer, final in zip(stage.buffers(), entry.buffers[stage.pipeline], strict=True):
            if buffer is not final:
                overwrite(buffer, final)
    if stage.boundary:
        stage.boundary = entry.buffers


# Streams: an owner sends its gradient accumulator to its shadows every N microbatches, to shorten a replay.
#
#     owner    B0 B1 STREAM1 B2 B3 STREAM3 B4 x      (N = 2; killed in B4)
#     shadow         keeps accumulator 0..1, then 0..3: replays from microbatch 4
#
# Rules: a stream is one tensor of bytes, and a copy, because the next backward adds in place. It contains a flag for
# each parameter with a gradient, the losses, the buffers before each forward since the last stream, and the gradients.
# A shadow sets its buffers and its count of forwards to that point, unless it has run these forwards itself. It keeps
# the newest gradients separately, and moves them into its replica only in `settle`, before it reports its inventory.
# `settle` also takes a stream that has arrived completely. Streams are messages aside, so no other transfer waits for
# them. One receive per slot is posted ahead.
#
# A HAND is a stream to the owner of a slot, in the plan of an epoch, with the buffers before all forwards it counts.

_ALIGNED = 64  # bytes: torch's alignment


class GradientStreams:
    """The streams that one worker sends and receives."""

    def __init__(self, job: Job, worker: int, replicas: Replicas):
        self.job = job
        self.worker = worker
        self.replicas = replicas
        self._receipts: dict[Slot, tuple[Action, ...]] = {}  # the streams to receive in a program
        self._coming: dict[Slot, deque[Action]] = {}  # those still to come in the open step
        self._newest: dict[Slot, tuple[int, list[Tensor | None]]] = {}  # (number of backwards, gradients)

    def enter(self, plane: Transport, ownership: Ownership, routes: Routes, actions: Sequence[Action]) -> None:
        """Sets the plane, the ownership, the routes and the actions of the next program."""
        self._channel = plane.aside
        self._ownership = ownership
        self._routes = routes
        self._receipts = {}
        for action in actions:
            slot = _slot(action)
            if action.op in (Op.STREAM, Op.HAND) and not self._sends(action):
                self._receipts[slot] = (*self._receipts.get(slot, ()), action)

    def _sends(self, action: Action) -> bool:
        owns = self._ownership.owner(*_slot(action)) == self.worker
        return owns is (action.op is Op.STREAM)

    def begin(self) -> None:
        """Begins the program: posts the first receive of each slot."""
        self._coming = {slot: deque(actions) for slot, actions in self._receipts.items()}
        for slot in self._coming:
            self._post(slot)

    def clear(self) -> None:
        """Drops the streams of the open step."""
        self._coming, self._newest = {}, {}

    def held(self) -> Iterator[tuple[Slot, list[Tensor]]]:
        """Yields the newest accumulators that have arrived for each slot."""
        for slot, (_, gradients) in self._newest.items():
            yield slot, [gradient for gradient in gradients if gradient is not None]

    def run(self, action: Action, step: int) -> None:
        """Runs a STREAM or a HAND: one end sends its accumulator, the other waits for it."""
        slot = _slot(action)
        if self._sends(action):
            stream = packed(self.replicas.stages[slot], action.microbatch, self._num_forwards(action))
            for target in self._routes.targets[_value(action)]:
                self._channel.send(target, self._key(action), (stream,))
            return
        (arrived,) = self._channel.take(*self._next(slot))
        self._take_in(slot, arrived)
        if action.op is Op.HAND:
            self.replicas.stages[slot].take_added(*self._newest.pop(slot))
        self._post(slot)

    def _num_forwards(self, action: Action) -> int:
        """Returns the number of forwards whose buffers a stream contains."""
        return self.job.log_every if action.op is Op.STREAM else action.microbatch + 1

    def settle(self) -> None:
        """Moves the newest accumulators into the replicas without waiting; ignores later ones of this program."""
        for slot in [slot for slot, actions in self._coming.items() if actions]:
            arrived = self._channel.take_arrived(*self._next(slot))
            if arrived is not None:
                self._take_in(slot, arrived[0])
        for slot, (added, gradients) in self._newest.items():
            self.replicas.stages[slot].take_added(added, gradients)
        self.clear()

    def _next(self, slot: Slot) -> tuple[int, AsideKey]:
        action = self._coming[slot][0]
        return self._routes.sources[_value(action)], self._key(action)

    def _key(self, action: Action) -> AsideKey:
        return aside_key(self._ownership.grid, AsidePurpose.STREAM, *_slot(action), action.microbatch)

    def _post(self, slot: Slot) -> None:
        if self._coming[slot]:
            action = self._coming[slot][0]
            specs = specs_of(self.replicas.stages[slot], action.microbatch, self._num_forwards(action))
            source, key = self._next(slot)
            self._channel.post(source, key, (TensorSpec((sum(map(_room, specs)),), torch.uint8, False),))

    def _take_in(self, slot: Slot, arrived: Tensor) -> None:
        action, replica = self._coming[slot].popleft(), self.replicas.stages[slot]
        microbatch, num_forwards = action.microbatch, self._num_forwards(action)
        parts = iter(unpacked(arrived, specs_of(replica, microbatch, num_forwards)))
        with replica.device.waiting():
            present = next(parts).tolist()
            losses = next(parts).tolist() if replica.is_last else []
        template = replica.history.before(microbatch)
        befores = {before: filled(template, parts) for before in _forwards_in(microbatch, num_forwards)}
        if microbatch >= replica.counted:
            replica.history.note(replica.counted)
            replica.history.take_over(befores)
            replica.losses = dict(enumerate(losses))
            replica.counted = microbatch + 1
        gradients = [part if there else None for part, there in zip(parts, present, strict=True)]
        self._newest[slot] = (microbatch + 1, gradients)


def _slot(action: Action) -> Slot:
    return action.pipeline, action.stage


def _value(action: Action) -> Value:
    return Value(Kind.STREAMED, *_slot(action), action.microbatch)


def packed(stage: Stage, microbatch: int, num_forwards: int) -> Tensor:
    """Returns the stream of a slot after a backward, as uint8 [n], with the buffers of the last `num_forwards`."""
    gradients = [parameter.grad for parameter in stage.trained()]
    there = [gradient is not None for gradient in gradients]
    parts: list[Tensor | None] = [torch.tensor(there, dtype=torch.uint8, device="cpu")]
    if stage.is_last:
        losses = [stage.losses[index] for index in range(microbatch + 1)]
        parts.append(torch.tensor(losses, dtype=torch.float64, device="cpu"))
    for index in _forwards_in(microbatch, num_forwards):
        parts += stage.history.before(index).tensors()
    specs = specs_of(stage, microbatch, num_forwards)
    stream = torch.empty(sum(map(_room, specs)), dtype=torch.uint8, device=stage.device.place)
    with stage.device.waiting():
        for place, part in zip(unpacked(stream, specs), [*parts, *gradients], strict=True):
            if part is not None:
                place.copy_(part)
    return stream


def specs_of(stage: Stage, microbatch: int, num_forwards: int) -> list[TensorSpec]:
    """Returns the specs of the parts of a stream, equal at owner and shadow."""
    gradients = [TensorSpec.of(parameter).as_gradient() for parameter in stage.trained()]
    losses = [TensorSpec((microbatch + 1,), torch.float64, False)] if stage.is_last else []
    buffers = [TensorSpec.of(buffer) for buffer in stage.history.before(microbatch).tensors()]
    return [TensorSpec((len(gradients),), torch.uint8, False), *losses, *buffers * num_forwards, *gradients]


def unpacked(stream: Tensor, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """Yields the parts of a stream as views of it."""
    at = 0
    for spec in specs:
        yield stream[at : at + spec.num_bytes].view(spec.dtype).view(spec.shape)
        at += _room(spec)


def _forwards_in(microbatch: int, num_forwards: int) -> range:
    """Returns the forwards whose earlier buffers a stream contains: the last `num_forwards - 1`, and the next one."""
    return range(microbatch + 2 - num_forwards, microbatch + 2)


def filled(template: BufferSnapshot, parts: Iterator[Tensor]) -> BufferSnapshot:
    """Returns copies of the next buffers of a stream in the memory layout of the template."""
    copy = template.copy()
    for buffer in copy.tensors():
        overwrite(buffer, next(parts))
    return copy


def _room(spec: TensorSpec) -> int:
    return -(-spec.num_bytes // _ALIGNED) * _ALIGNED
