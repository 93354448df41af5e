"""The bytes of tensors that operations make, and the most of them that live at once: counted on any device.

Rules: memory counts once, whatever its number of tensors, from the operation that makes it until nobody holds it. It
counts as an allocator of a GPU gives it, in whole blocks. Memory that a kernel takes inside of itself is not seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

BLOCK = 512  # bytes, of torch's allocator


class LiveBytes(TorchDispatchMode):
    """Sees the operations of this thread in its block; the backward of a GPU, in another thread, takes its modes."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.most = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: else torch imports its compiler at the first operation, which takes seconds."""
        return False

    def begin(self) -> int:
        """Begins to look for the most bytes anew; returns those that live now."""
        self._forget_dead()
        self.most = self.now
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_address(each) for each in tree_flatten((args, kwargs))[0] if _has_memory(each)}
        for each in tree_flatten(out)[0]:
            if _has_memory(each) and _address(each) not in given:
                self._add(each)
        return out

    def _add(self, tensor: Tensor) -> None:
        self._forget_dead()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            size = in_blocks(storage.nbytes())
            self._alive[storage._cdata] = StorageWeakRef(storage), size
            self.now += size
            self.most = max(self.most, self.now)

    def _forget_dead(self) -> None:
        for address in [address for address, (memory, _) in self._alive.items() if memory.expired()]:
            self.now -= self._alive.pop(address)[1]


def in_blocks(num_bytes: int) -> int:
    """Returns the bytes that an allocator gives for so many."""
    return -(-num_bytes // BLOCK) * BLOCK


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
