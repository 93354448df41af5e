"""The residual of a microbatch: the data that a stage keeps from its forward until the end of its backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.models.layers import Tensors
from engine.runtime.stage.buffers import BufferSnapshot
from engine.runtime.stage.segment import Segment

# For a later backward for the weights: (layer, segment, gradients of the segment's outputs).
Pending = list[tuple[int, Segment, Tensors]]


def groups_of(layers: Iterable[int], every: int) -> list[list[int]]:
    """Returns the groups of layers that are recomputed together; a group begins at each multiple of `every`."""
    groups: dict[int, list[int]] = {}
    for index in layers:
        groups.setdefault(index // every if every else 0, []).append(index)
    return list(groups.values())


@dataclass(slots=True)
class Checkpoint:
    """The inputs of a group of layers and its buffers before the forward: enough to run that forward again."""

    inputs: Tensors
    buffers: BufferSnapshot


@dataclass(slots=True)
class Residual:
    """The residual of one microbatch: for each group of layers all segments, or a checkpoint."""

    groups: list[list[Segment] | Checkpoint]
    outputs: Tensors
    loss: Segment | None = None
