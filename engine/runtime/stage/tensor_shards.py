"""Shards: parts of a tensor on several workers, as torch's DTensor; a tensor of another type is whole.

torch.distributed.tensor is imported only when there are shards, because the import takes a second.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.runtime.transport.suspicion import suspecting


def as_shard_of(shard: Tensor, whole: Tensor) -> Tensor:
    """Returns the part of `whole` that corresponds to `shard`; `whole` itself if `shard` is a plain tensor."""
    mesh = getattr(shard, "device_mesh", None)
    if mesh is None:
        return whole
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = shard
    return distribute_tensor(whole, mesh, sharded.placements, src_data_rank=None)  # all have it: nothing is sent


def local_part(tensor: Tensor) -> Tensor:
    """Returns the data of a tensor; of a shard, the part that is here."""
    to_local = getattr(tensor, "to_local", None)
    here: Tensor = tensor if to_local is None else to_local()
    return here.detach()


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole tensor. For a shard it is a collective: every worker with a shard must call it.

    Raises TransferFailedError if another worker is gone.
    """
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    with suspecting("putting shards together"):
        whole: Tensor = gather()
    return whole
