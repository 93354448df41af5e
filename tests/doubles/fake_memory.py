"""The memory of the double of a GPU: the bytes that each worker holds, as torch's allocator would tell them.

A worker is a thread, and the streams that it has made: memory belongs to the worker of the present stream; the first
stream is that of all. `most` counts whole blocks, from the operation that makes memory until nobody holds it.
"""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

BLOCK, SEGMENT = 512, 2 << 20


class FakeMemory:
    """The bytes of all workers; the caller of `allocated` holds the lock of the double."""

    def __init__(self) -> None:
        self.free, self.num_emptied = 80 << 30, 0
        self._alive: dict[str, dict[int, tuple[StorageWeakRef, int]]] = {}
        self._now: Counter[str] = Counter()
        self._most: Counter[str] = Counter()

    def allocated(self, maker: str, reference: StorageWeakRef, num_bytes: int) -> None:
        """Takes new memory, of a stream with this maker, empty for the first one."""
        worker = maker or threading.current_thread().name
        self._forget_dead(worker)
        size = -(-num_bytes // BLOCK) * BLOCK
        self._alive.setdefault(worker, {})[reference.cdata] = reference, size
        self._now[worker] += size
        self._most[worker] = max(self._most[worker], self._now[worker])

    def _forget_dead(self, worker: str) -> None:
        alive = self._alive.get(worker, {})
        for address in [address for address, (memory, _) in alive.items() if memory.expired()]:
            self._now[worker] -= alive.pop(address)[1]

    def most(self, place: torch.device | None = None) -> int:
        """Returns the most bytes of this thread's worker since `reset`."""
        return self._most[threading.current_thread().name]

    def reserved(self, place: torch.device | None = None) -> int:
        """Returns the most bytes in whole segments."""
        return -(-self.most() // SEGMENT) * SEGMENT

    def empty(self) -> None:
        """Counts a call that gives memory back."""
        self.num_emptied += 1

    def reset(self, place: torch.device | None = None) -> None:
        """Begins to look for the most bytes anew."""
        worker = threading.current_thread().name
        self._forget_dead(worker)
        self._most[worker] = self._now[worker]

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Puts the figures in the place of those of CUDA."""
        patch.setattr(torch.cuda, "max_memory_allocated", self.most)
        patch.setattr(torch.cuda, "max_memory_reserved", self.reserved)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        patch.setattr(torch.cuda, "mem_get_info", lambda place: (self.free, 80 << 30))
        patch.setattr(torch.cuda, "empty_cache", self.empty)
