"""Communicators of NCCL itself, on one stream of the worker's GPU. None of this has run on a GPU yet.

Rules: a tensor of any dtype is sent as bytes, so no number is changed. Each message is a group of its own, also of one
tensor: its operations begin together. A pair is connected at its first message, in the call that gives it: so
`connect` is one byte from each rank to each other, with the patience of a join.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.models.layers import Tensors
from engine.runtime.device.device_errors import device_trouble
from engine.runtime.device.side_queue import QueueMoment, SideQueue
from engine.runtime.nccl.library import NcclLibrary

_OPEN_S = 60.0
_GIVE_S = 10.0  # for a call that gives work; it does not wait for the work


class NcclCommunicator:
    """One communicator of this process."""

    def __init__(self, library: NcclLibrary, own: ctypes.c_void_p, queue: SideQueue, is_given_up: Callable[[], bool]):
        self._library, self._own, self._queue, self._is_given_up = library, own, queue, is_given_up

    @contextmanager
    def _as_one(self, patience_s: float = _GIVE_S) -> Iterator[None]:
        self._library.begin_group()
        try:
            yield
        finally:
            self._library.end_group()
        self._library.settled(self._own, time.monotonic() + patience_s, self._is_given_up)

    def send(self, tensors: Tensors, rank: int) -> None:
        """Gives tensors to a rank, as one."""
        with self._as_one():
            for each in tensors:
                if each.nbytes:
                    self._library.send(self._own, each.data_ptr(), each.nbytes, rank, self._queue.handle)

    def receive(self, tensors: Tensors, rank: int) -> None:
        """Fills tensors with those of the next send of a rank."""
        with self._as_one():
            for each in tensors:
                if each.nbytes:
                    self._library.receive(self._own, each.data_ptr(), each.nbytes, rank, self._queue.handle)

    def exchange(self, rank: int, size: int) -> None:
        """Sends each other rank a byte, and waits until all have come."""
        bytes_of = self._first_bytes = self._queue.room((2 * size,), torch.uint8)  # NCCL may use them until the abort
        with self._as_one(_OPEN_S):
            for other in range(size):
                if other != rank:
                    at = bytes_of.data_ptr() + 2 * other
                    self._library.send(self._own, at, 1, other, self._queue.handle)
                    self._library.receive(self._own, at + 1, 1, other, self._queue.handle)
        connected = self._queue.moment()
        deadline_s = time.monotonic() + _OPEN_S
        while not connected.has_come():
            if self._is_given_up() or time.monotonic() > deadline_s or self.failure():
                raise RuntimeError(self.failure() or "the first message of each pair has not come in time")
            time.sleep(0.001)

    def pending(self) -> QueueMoment:
        """Returns the end of all work that was given so far."""
        return self._queue.moment()

    def failure(self) -> str:
        """Returns the words of an error since; empty without one. Raises that of the own device."""
        try:
            self._library.progress(self._own)
        except RuntimeError as error:
            if device_trouble(error):
                raise
            return str(error)
        return ""

    def revoke(self) -> None:
        """Ends all work."""
        self._library.revoke(self._own)

    def abort(self) -> None:
        """Ends the communicator."""
        self._library.abort(self._own)


class NcclOpening:
    """A communicator of this process whose ranks are joining: NCCL does it in a thread of its own."""

    def __init__(self, library: NcclLibrary, own: ctypes.c_void_p, rank: int, size: int, queue: SideQueue):
        self._library, self._own, self._rank, self._size, self._queue = library, own, rank, size, queue
        self._deadline_s = time.monotonic() + _OPEN_S

    def has_joined(self) -> bool:
        """Returns whether all ranks have joined."""
        if self._library.progress(self._own):
            return True
        if time.monotonic() > self._deadline_s:
            raise RuntimeError("the other ranks have not joined in time")
        return False

    def connect(self, is_given_up: Callable[[], bool]) -> NcclCommunicator:
        """Sends each other rank the first byte, and waits until all have come."""
        found = self._connecting = NcclCommunicator(self._library, self._own, self._queue, is_given_up)
        found.exchange(self._rank, self._size)
        return found

    def revoke(self) -> None:
        """Ends its work."""
        self._library.revoke(self._own)

    def abort(self) -> None:
        """Ends it."""
        self._library.abort(self._own)


class NcclCommunicators:
    """The communicators of one worker."""

    def __init__(self, library: NcclLibrary):
        self._library = library

    def new_id(self) -> bytes:
        """Returns the id of a new group."""
        return self._library.new_id()

    def begin(self, group_id: bytes, rank: int, size: int, queue: SideQueue) -> NcclOpening:
        """Begins to join a group."""
        own = self._library.begin_join(group_id, rank, size)
        return NcclOpening(self._library, own, rank, size, queue)
