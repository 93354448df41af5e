"""The state of a worker's share of a checkpoint: the tensors of each layer at a step boundary, and a copy of them.

Rules: the weights and the optimizer state change in place with the next step only, so the copy may run beside the open
step. Where a worker can take over, every replica has copies of the buffers at the boundary, which no forward changes.
Elsewhere the buffers are live, and are copied at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.checkpoints.keeping import StateShare
from engine.core.ownership import Slot
from engine.runtime.checkpoint.layer_file import LayerImage, laid_out
from engine.runtime.checkpoint.state_dict_names import state_dict_names
from engine.runtime.stage.buffers import named_copies
from engine.runtime.stage.optimizer import LayerOptimizer
from engine.runtime.stage.stage import Stage

NamedTensors = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class LayerState:
    """The tensors of one layer, or of one shard of it, by their names in a checkpoint.

    `live` are those that the next step changes; `fixed` are not changed any more. A part has the same `transient` and
    `aliases`.
    """

    layer: int
    shard: int
    shards: int
    live: NamedTensors
    fixed: NamedTensors
    transient: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]

    def copied(self, image: LayerImage | None = None) -> LayerImage:
        """Returns the state in memory that nothing else changes: in the image of an older step, if it has its form."""
        tensors = [*self.fixed, *self.live]
        if image is None or not image.takes(tensors):
            image = LayerImage(tensors)
        image.fill(tensors)
        return image


def state_of(share: StateShare, stages: Mapping[Slot, Stage]) -> Iterator[LayerState]:
    """Yields the state of each layer of a share, from the replicas of a worker at a step boundary."""
    stage = stages[share.slot]
    buffers = _buffers_of(stage, stages, share.slot[1])
    for index, layer in stage.layers.items():
        named = [
            (f"buffer/{pipeline}/{name}", tensor)
            for pipeline, by_layer in buffers.items()
            for name, tensor in by_layer[index]
        ]
        live = list(_own_tensors(stage.optimizers[index]))
        yield LayerState(index, share.shard, share.shards, live, named, *state_dict_names(layer))


def _own_tensors(optimizer: LayerOptimizer) -> Iterator[tuple[str, Tensor]]:
    for name, kept in optimizer.kept.items():
        yield f"weight/{name}", kept.detach()
    for name, named in optimizer.state.items():
        for key, tensor in named.items():
            yield f"optimizer/{name}/{key}", tensor


def _buffers_of(stage: Stage, stages: Mapping[Slot, Stage], index: int) -> dict[int, dict[int, NamedTensors]]:
    """Returns the buffers of each pipeline by layer: those of the boundary, or copies where there are none."""
    if stage.boundary:
        return {pipeline: named_copies(stage.layers, kept) for pipeline, kept in enumerate(stage.boundary)}
    return {
        pipeline: {at: copies_of(list(layer.named_buffers())) for at, layer in each.layers.items()}
        for (pipeline, other), each in sorted(stages.items())
        if other == index
    }


def copies_of(named: NamedTensors) -> NamedTensors:
    """Returns copies of tensors, with their strides."""
    with torch.no_grad():
        copies = [_empty_like(tensor) for _, tensor in named]
        dense = [(copy, tensor) for copy, (_, tensor) in zip(copies, named, strict=True) if copy is not None]
        if dense:  # one call, so that another thread can run Python meanwhile
            torch._foreach_copy_([copy for copy, _ in dense], [tensor for _, tensor in dense])
        return [
            (name, laid_out(tensor, tensor.stride()) if copy is None else copy)
            for (name, tensor), copy in zip(named, copies, strict=True)
        ]


def _empty_like(tensor: Tensor) -> Tensor | None:
    """Returns an uninitialised tensor with the strides of a dense one; None for any other."""
    empty = torch.empty_like(tensor, requires_grad=False)
    return empty if empty.stride() == tensor.stride() else None
