"""The memory of tensors on the host as bytes, which a socket or a ring reads and writes in place."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the host, which lives as long as they do.

    It makes no tensor: each call of torch is slow in a process that has just woken.
    """
    memory = _array(tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


@cache
def _array(size: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * size


def host_room(size: int) -> memoryview:
    """Returns uninitialised memory for a message."""
    return memory_of(torch.empty(size, dtype=torch.uint8, device="cpu"))


def tensor_of(memory: memoryview) -> Tensor:
    """Returns the tensor of which `memory_of` made this memory, or a part of it.

    It is the same one: torch knows pinned memory by its storage, and takes it back before its copies are over if these
    are made from another storage at the same place.
    """
    return memory.obj.tensor  # type: ignore[attr-defined]
