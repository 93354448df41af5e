"""Hashes of state: SHA-256 over name, dtype, shape and bytes of each tensor, in order.

The mark of a tensor is the hash up to and including it: the first mark that differs identifies the first tensor that
differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.checks.trajectory import MARK_DIGITS

MarkedHash = tuple[str, list[tuple[str, str]]]  # the SHA-256 of tensors, and the mark of each with its name


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Returns the SHA-256 of named tensors as hex digits."""
    return marked_hash(tensors)[0]


def marked_hash(tensors: Iterable[tuple[str, Tensor]]) -> MarkedHash:
    """Returns the SHA-256 of named tensors as hex digits, and the name and mark of each."""
    digest, marks = hashlib.sha256(), []
    for name, tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {list(plain.shape)}\n".encode())
        # As bytes, because numpy lacks bfloat16.
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        marks.append((name, digest.hexdigest()[:MARK_DIGITS]))
    return digest.hexdigest(), marks


class Shard(NamedTuple):
    """Part `number` of `total` of each tensor, as by `torch.chunk`, maybe empty; one without dimensions is whole."""

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
