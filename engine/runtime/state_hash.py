"""Hashes of state: SHA-256 over name, dtype, shape and bytes of each tensor, in order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from engine.runtime.shards import put_together


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Returns the SHA-256 of named tensors as hex digits."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        plain = put_together(tensor).detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {list(plain.shape)}\n".encode())
        # A view as bytes: numpy knows neither bfloat16 nor every other dtype.
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
