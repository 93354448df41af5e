"""The rendezvous of a run: memory without a name, to which all its workers append the keys of each epoch.

Only a process that was given the descriptors can open it, no process serves it, and nothing of it is left behind.

Rules: a key is set by one write at the end of the memory, so no writer holds a lock. A worker that is stopped or killed
in the middle of a call therefore delays no other worker; the line that its death has cut is skipped. A bell, which is
an event descriptor, rings with each key. No worker reads the bell: each ring is an edge for every worker that waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store


class MeetingPlace(NamedTuple):
    """The descriptors of the rendezvous, which all workers of a run have."""

    memory_fd: int  # opened for appending
    bell_fd: int


class Rendezvous(Store):
    """The keys of one epoch, or of another `group` of workers; for gloo, which sets, waits and gets."""

    def __init__(self, place: MeetingPlace, group: str):
        super().__init__()
        self._place = place
        self._begin = f"[{json.dumps(group)}, ".encode()  # of the lines of this group
        self._num_read = 0  # bytes
        self._values: dict[str, bytes] = {}
        self._is_given_up = False

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stub has text
        """Sets a key, for all workers."""
        line = self._begin + f'{json.dumps(key)}, "{value.hex()}"]'.encode()
        os.write(self._place.memory_fd, b"\n" + line + b"\n")  # the first newline ends a line that was cut
        os.eventfd_write(self._place.bell_fd, 1)

    def get(self, key: str) -> bytes:
        """Returns the value of a key, which must have been waited for."""
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:  # type: ignore[override]  # torch's has two forms
        """Waits until all keys are set; raises RuntimeError after `timeout`, or when another thread gives up."""
        until_s = time.monotonic() + timeout.total_seconds()
        with select.epoll() as rings:
            rings.register(self._place.bell_fd, select.EPOLLIN | select.EPOLLET)
            while not self._has_all(keys):
                left_s = until_s - time.monotonic()
                if self._is_given_up or left_s <= 0:
                    raise RuntimeError(f"no worker has set {', '.join(keys)} in time")
                rings.poll(left_s)

    def give_up(self) -> None:
        """Ends the present wait and every later one."""
        self._is_given_up = True
        os.eventfd_write(self._place.bell_fd, 1)

    def _has_all(self, keys: Sequence[str]) -> bool:
        if not self._values.keys() >= set(keys):
            self._read_on()
        return self._values.keys() >= set(keys)

    def _read_on(self) -> None:
        memory_fd = self._place.memory_fd
        block = os.pread(memory_fd, os.fstat(memory_fd).st_size - self._num_read, self._num_read)
        lines = block[: block.rfind(b"\n") + 1]
        self._num_read += len(lines)
        for line in lines.splitlines():
            if line.startswith(self._begin):
                with contextlib.suppress(ValueError):  # it was cut
                    _, key, value = json.loads(line)
                    self._values[key] = bytes.fromhex(value)
