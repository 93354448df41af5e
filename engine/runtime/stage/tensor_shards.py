"""Shards: the parts of each tensor of a stage, along its first dimension, each kept by another worker."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Shard(NamedTuple):
    """Shard `number` of `total`, as `torch.chunk` cuts a tensor; the last ones may be empty.

    A tensor without dimensions is whole in each.
    """

    number: int
    total: int

    def of(self, whole: Tensor) -> Tensor:
        """Returns the part of a tensor, as a view."""
        if self.total == 1 or not whole.dim():
            return whole
        rows = -(-len(whole) // self.total)
        begin = min(self.number * rows, len(whole))
        return whole[begin : begin + rows]


WHOLE = Shard(0, 1)
