"""The log: the inputs of the optimizer step of a slot. The owner sends them to its shadows, not the new state.

Rules: each replica that applies the entry of a step gets the same bits. An entry therefore has the reduced gradients;
the clip factor follows with the commit. It has the buffers and losses of every pipeline, because a replica may take
over the same stage of another pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

import torch
from torch import Tensor

from engine.core.config.loss_scaling import inverse_of
from engine.models.layers import Tensors
from engine.runtime.device.missing_gradients import look_at
from engine.runtime.stage.buffers import overwrite
from engine.runtime.stage.stage import Stage
from engine.runtime.transport.bulk_transfer import post_bulk, receive_bulk, send_bulk
from engine.runtime.transport.tensor_spec import TensorSpec, laid_out_as
from engine.runtime.transport.transfer_key import ProgramKey
from engine.runtime.transport.transport import Channel

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
        counted = {
            layer: [each for name, each in named.items() if (layer, name) not in skipped]
            for layer, named in self.gradients.items()
        }
        norms = iter(_norms([each for of_layer in counted.values() for each in of_layer]))
        return [(layer, _sum_of_squares(islice(norms, len(of_layer)))) for layer, of_layer in counted.items()]

    def loss(self, pipeline: int) -> float | None:
        """Returns the training loss of one pipeline, or None; `fmean`, as `sum` differs between Python versions."""
        losses = self.losses[pipeline][0].tolist() if self.losses else []
        if not all(map(math.isfinite, losses)):
            return sum(losses) / len(losses)  # `fmean` refuses two infinities
        return fmean(losses) if losses else None


def losses_of(stage: Stage) -> Tensors:
    """Returns the losses of the step as one float64 tensor of shape (M,); empty except on the last stage."""
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
    """Returns gradients of a loss that was multiplied by a scale, without it."""
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
    """Returns the specs of the gradients in a log entry, and of the buffers and losses of all pipelines."""
    gradients = [TensorSpec.of(parameter).as_gradient() for parameter in stage.trained()]
    buffers = [TensorSpec.of(buffer) for buffer in stage.buffers()]
    losses = [TensorSpec((stage.job.microbatches,), torch.float64, False)] if stage.is_last else []
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


def _norms(gradients: Sequence[Tensor]) -> list[float]:
    """Returns the norm of each gradient, with one wait for the device."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return list(torch.stack(norms).tolist()) if norms else []


def _sum_of_squares(norms: Iterable[float]) -> float:
    total = 0.0
    for norm in norms:
        total += norm**2
    return total
