"""The memory of a worker's GPU: reported with a prediction after each step in which it has changed.

Rules: before training, each stage here is tried with two microbatches, without side effects, so a prediction knows how
much a microbatch takes on this device. The memory of the host is neither tried nor reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from engine.core.action import Action
from engine.core.history.run_records import MemoryRecord
from engine.core.job.memory_model import MicrobatchBytes, StageBytes, device_bytes
from engine.core.ownership import Ownership
from engine.models.data import Data
from engine.models.data_sources import largest
from engine.models.layers import Batch, Tensors
from engine.models.slices import slice_of
from engine.runtime.device.action_clock import LiveBytes, in_blocks
from engine.runtime.stage.buffers import lending, modules_of, snapshot_of
from engine.runtime.stage.random_streams import set_back
from engine.runtime.stage.replicas import Replicas
from engine.runtime.stage.stage import Stage
from engine.runtime.transport.transport import Border


def stage_bytes(stage: Stage) -> StageBytes:
    """Returns the sizes of a stage whose optimizers have taken a step; with shards, those of the part here."""
    optimizers, weights = stage.optimizers.values(), [p for layer in stage.layers.values() for p in layer.parameters()]
    return StageBytes(
        weights=num_bytes(weight for each in optimizers for weight in each.kept.values()),
        whole=num_bytes(weights),
        trained=num_bytes(each for each in weights if each.requires_grad),
        optimizer=num_bytes(state for each in optimizers for named in each.state.values() for state in named.values()),
        buffers=num_bytes(stage.buffers()),
        output=sum(spec.num_bytes for spec in stage.border or ()),
    )


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the total size of the elements of these tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def microbatch_bytes(stage: Stage, inputs: Tensors, targets: Tensors | None) -> MicrobatchBytes:
    """Returns the bytes that a microbatch takes, measured on two of them; restores the stage afterwards."""
    modules, slices = modules_of(stage.layers.values()), stage.slices
    stage.slices = 1  # each microbatch is the first slice of one
    try:
        with set_back(stage.device), lending(modules, snapshot_of(modules).copy().buffers()), LiveBytes() as live:
            for microbatch in (0, 1):
                before = live.begin()
                stage.forward(0, microbatch, inputs, targets)
                most, after = live.most, live.begin()
            for microbatch in (0, 1):  # the second adds to existing gradients
                begin = live.begin()
                stage.backward(0, microbatch, _ones_for(stage, microbatch))
    finally:
        stage.forget_step()
        stage.slices, stage.peak_stash = slices, 0
    num_input_bytes = sum(in_blocks(each.nbytes) for each in (*inputs, *(targets or ())))
    largest = max((each.nbytes for each in stage.trained()), default=0)
    return MicrobatchBytes(after - before + num_input_bytes, most - after, live.most - begin, largest)


def _ones_for(stage: Stage, microbatch: int) -> Tensors:  # whose tensors must not outlive the backward
    outputs = () if stage.is_last else stage.residuals[microbatch].outputs
    return tuple(torch.ones_like(tensor) for tensor in outputs if tensor.requires_grad)


_SAME = 0.01  # of the bytes reported last


class MemoryWatch:
    """Watches the peak memory of a worker; `borders` has those of all stages."""

    def __init__(
        self, worker: int, replicas: Replicas, borders: Sequence[Border], write: Callable[[MemoryRecord], None]
    ):
        self._worker, self._replicas, self._borders, self._write = worker, replicas, borders, write
        self._tried: dict[int, MicrobatchBytes] = {}
        self._reported = (0, 0)

    def begin(self, data: Data) -> None:
        """Tries the stages here, and resets the peak."""
        if self._replicas.device.is_host:
            return
        for (_, index), stage in self._replicas.stages.items():
            with contextlib.suppress(Exception), set_back(self._replicas.device):  # training will show a layer's error
                batch = Batch((), ())
                if index == 0 or stage.is_last:
                    job = self._replicas.job
                    batch = slice_of(data.microbatch(*largest(job, data), job.microbatch_size), 0, job.slices)
                targets = self._replicas.device.put_all(batch.targets) if stage.is_last else None
                self._tried[index] = microbatch_bytes(stage, self._inputs(index, batch), targets)
        self._replicas.device.memory_peak()

    def _inputs(self, index: int, batch: Batch) -> Tensors:
        device = self._replicas.device
        return tuple(spec.zeros(device) for spec in self._borders[index - 1]) if index else device.put_all(batch.inputs)

    def step_ends(self, step: int, ownership: Ownership, actions: Callable[[], Sequence[Action]]) -> None:
        """Reports the peak of a step, if it differs from the last report; `actions` returns those of a usual step."""
        peak = self._replicas.device.memory_peak()
        if peak is None or all(abs(now - old) <= _SAME * old for now, old in zip(peak, self._reported, strict=True)):
            return
        self._reported = allocated, reserved = peak
        predicted = self._predicted(ownership, actions())
        self._write(MemoryRecord(step=step, allocated=allocated, reserved=reserved, predicted=predicted))

    def _predicted(self, ownership: Ownership, actions: Sequence[Action]) -> int:
        """Returns the prediction; 0 if a stage was not tried here, such as that of a later replica."""
        stages = {stage for _, stage in ownership.held_by(self._worker)}
        if not stages <= self._tried.keys():
            return 0
        sizes = {
            index: StageBytes(0, 0, 0, 0, 0, sum(spec.num_bytes for spec in border))
            for index, border in enumerate(self._borders)
        }
        sizes |= {index: stage_bytes(stage) for (_, index), stage in self._replicas.stages.items()}
        return device_bytes(self._replicas.job, actions, ownership, self._worker, sizes, self._tried)
