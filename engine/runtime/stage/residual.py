"""What a stage keeps of a microbatch between its forward and its backward, and between the two parts of a backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.models.layers import Tensors
from engine.runtime.stage.buffers import Snapshot
from engine.runtime.stage.segment import Segment

Pending = list[tuple[int, Segment, Tensors]]  # of a backward for the weights: layer, segment, gradients of its outputs


def groups_of(layers: Iterable[int], every: int) -> list[list[int]]:
    """Returns layers in the groups that are recomputed together; a group begins at each multiple of `every`."""
    groups: dict[int, list[int]] = {}
    for index in layers:
        groups.setdefault(index // every if every else 0, []).append(index)
    return list(groups.values())


@dataclass(slots=True)
class Checkpoint:
    """What it takes to redo the forward of a group of layers: its inputs, and its buffers as they were before."""

    inputs: Tensors
    buffers: Snapshot


@dataclass(slots=True)
class Residual:
    """What a stage keeps of one microbatch: per group of layers either all segments, or what it takes to redo it."""

    groups: list[list[Segment] | Checkpoint]
    outputs: Tensors
    loss: Segment | None = None
