"""The sizes of a stage in bytes: those of its tensors, and those that a microbatch takes, counted as it runs."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from engine.core.analysis.memory_model import MicrobatchBytes, StageBytes
from engine.models.layers import Tensors
from engine.runtime.device.live_bytes import LiveBytes, in_blocks
from engine.runtime.stage.buffers import lending, modules_of, snapshot_of
from engine.runtime.stage.random_streams import set_back
from engine.runtime.stage.stage import Stage


def stage_bytes(stage: Stage) -> StageBytes:
    """Returns the sizes of a stage whose optimizers have taken a step; of a shard, the part that is here."""
    optimizers, weights = stage.optimizers.values(), [p for layer in stage.layers.values() for p in layer.parameters()]
    return StageBytes(
        weights=num_bytes(kept for each in optimizers for kept in each.kept.values()),
        whole=num_bytes(weights),
        trained=num_bytes(each for each in weights if each.requires_grad),
        optimizer=num_bytes(state for each in optimizers for named in each.state.values() for state in named.values()),
        buffers=num_bytes(stage.buffers()),
        output=sum(prod(spec.shape) * spec.dtype.itemsize for spec in stage.border or ()),
    )


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the size of the elements of all these tensors."""
    return sum(each.numel() * each.itemsize for each in tensors)


def microbatch_bytes(stage: Stage, inputs: Tensors, targets: Tensors | None) -> MicrobatchBytes:
    """Returns the bytes that a microbatch takes, of two that run forward and backward; the stage stays as it was."""
    modules = modules_of(stage.layers.values())
    try:
        with set_back(stage.device), lending(modules, snapshot_of(modules).copy().buffers()), LiveBytes() as live:
            for microbatch in (0, 1):
                before = live.begin()
                stage.forward(0, microbatch, inputs, targets)
                most, after = live.most, live.begin()
            for microbatch in (0, 1):  # the second one finds gradients to add to
                begin = live.begin()
                stage.backward(0, microbatch, _ones_for(stage, microbatch))
    finally:
        stage.forget_step()
        stage.peak_stash = 0
    given = sum(in_blocks(each.nbytes) for each in (*inputs, *(targets or ())))
    largest = max((each.nbytes for each in stage.trained()), default=0)
    return MicrobatchBytes(after - before + given, most - after, live.most - begin, largest)


def _ones_for(stage: Stage, microbatch: int) -> Tensors:
    outputs = () if stage.is_last else stage.residuals[microbatch].outputs
    return tuple(torch.ones_like(each) for each in outputs if each.requires_grad)
