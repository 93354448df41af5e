"""The sizes of a stage in bytes, counted from its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import Tensor

from engine.core.analysis.memory_model import StageBytes
from engine.runtime.stage.stage import Stage
from engine.runtime.stage.tensor_shards import local_part


def stage_bytes(stage: Stage) -> StageBytes:
    """Returns the sizes of a stage whose optimizers have taken a step; of a shard, the part that is here."""
    weights = [each for layer in stage.layers.values() for each in layer.parameters()]
    states = (named for each in stage.optimizers.values() for named in each.state.values())
    return StageBytes(
        weights=num_bytes(map(local_part, weights)),
        whole=num_bytes(weights),
        trained=num_bytes(each for each in weights if each.requires_grad),
        optimizer=num_bytes(local_part(each) for named in states for each in named.values()),
        buffers=num_bytes(stage.buffers()),
        output=sum(prod(spec.shape) * spec.dtype.itemsize for spec in stage.border or ()),
    )


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the size of the elements of all these tensors; of a shard, the size of the whole tensor."""
    return sum(each.numel() * each.itemsize for each in tensors)
