"""The seam to NCCL: all that bamboo asks of it, so that a double can stand in its place.

Rules: one thread of a worker calls everything here but `PendingWork.wait`. A send and a receive only give work to the
queue of the device: the work of one communicator is done in the order in which it was given, and the n-th receive from
a rank takes the n-th send to it. A RuntimeError is a suspicion: a peer that was killed may give no error at all.

The ranks of a communicator may join while another one of the worker is at work: that gives no work to a queue. It is
connected, which does, when the other one has been revoked: two at work may wait for each other's place on the device.
An abort gives memory free in which a rank that has not heard may be at work. So a communicator that has been at work is
revoked first, and aborted when each rank that is left has revoked its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.models.layers import Tensors
from engine.runtime.device.side_queue import SideQueue


class PendingWork(Protocol):
    """The end of work that was given to a queue."""

    def wait(self) -> None:
        """Waits until the work is done, or has been aborted; any thread may call."""


class Communicator(Protocol):
    """One end of a group of ranks."""

    def send(self, tensors: Tensors, rank: int) -> None:
        """Gives contiguous tensors to a rank, as one; never waits for it. They must not change before they are sent."""

    def receive(self, tensors: Tensors, rank: int) -> None:
        """Fills contiguous tensors with those of the next send of a rank; never waits for it."""

    def pending(self) -> PendingWork:
        """Returns the end of all work that was given so far."""

    def failure(self) -> str:
        """Returns the words of an error since; empty without one. Never waits. Raises that of the own device."""

    def revoke(self) -> None:
        """Ends all work, without the other ranks, and keeps the memory. It may hang."""

    def abort(self) -> None:
        """Ends the communicator, without the other ranks, and gives its memory free. It may hang."""


class Opening(Protocol):
    """A communicator whose ranks are joining."""

    def has_joined(self) -> bool:
        """Returns whether all ranks have joined; never waits. Raises RuntimeError if they cannot, or not in time."""

    def connect(self, is_given_up: Callable[[], bool]) -> Communicator:
        """Connects each rank with each, once all have joined, and waits for it.

        Raises RuntimeError if that fails, or when `is_given_up`; every later call of the communicator does so, too.
        """

    def revoke(self) -> None:
        """Ends the work of a `connect` that has failed, as that of a communicator. It may hang."""

    def abort(self) -> None:
        """Ends it, whether ranks are missing or not. It may hang."""


class Communicators(Protocol):
    """How a worker comes to its communicators."""

    def new_id(self) -> bytes:
        """Returns the id of a new group, which its first rank makes and tells the others."""

    def begin(self, group_id: bytes, rank: int, size: int, queue: SideQueue) -> Opening:
        """Begins to join a group; never waits. Raises RuntimeError if that fails."""
