"""Shards: parts of a tensor that lie with several workers, as torch's DTensor; every other tensor is whole here.

Nothing is imported from torch before the first shard is made: that costs a worker a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from engine.core.errors import WorkerFailedError


def as_shard_of(shard: Tensor, whole: Tensor) -> Tensor:
    """Returns the part of a whole tensor that goes with a shard; the tensor itself where there are no shards."""
    mesh = getattr(shard, "device_mesh", None)
    if mesh is None:
        return whole
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = shard
    return distribute_tensor(whole, mesh, sharded.placements, src_data_rank=None)  # everybody has it: nothing is sent


def put_together(tensor: Tensor) -> Tensor:
    """Returns the whole of a tensor; where it is in shards, all that hold some must call it."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    with suspecting("putting shards together"):
        whole: Tensor = gather()
    return whole


@contextlib.contextmanager
def suspecting(what: str) -> Iterator[None]:
    """Raises WorkerFailedError for what gloo raises when another worker is gone."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerFailedError(f"{what} failed: {error}") from error
