"""The backend of NCCL: the groups of one worker, each over the host first, and then between the GPUs of its members.

The members of a group meet over their agent, so all of them are there when its communicator is joined. A group that is
formed in advance joins it while the present one trains, and connects its GPUs when it is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from engine.core.errors import TransferFailedError
from engine.runtime.device.side_queue import SideQueue
from engine.runtime.nccl.communicator import Communicators
from engine.runtime.nccl.issue_queue import IssueQueue
from engine.runtime.nccl.nccl_thread import NcclThread
from engine.runtime.nccl.nccl_transport import LastResort, NcclTransport
from engine.runtime.transport.group_end import GroupEnd
from engine.runtime.transport.transport import LinkFaults

_HERE = "here"  # a member, by its rank; the first one tells the id of the communicator


class Meeting(Protocol):
    """The place where the members of one group tell each other values."""

    def set(self, key: str, value: bytes) -> None:
        """Tells a value."""

    def get(self, key: str) -> bytes:
        """Waits for a value; raises RuntimeError after `give_up`."""

    def give_up(self) -> None:
        """Ends every wait; any thread may call."""


class HostJoining(Protocol):
    """One attempt to join a group over the host."""

    def join(self) -> GroupEnd:
        """Waits until all members have joined."""

    def abandon(self) -> None:
        """Ends a `join` in another thread."""


class HostBackend(Protocol):
    """The groups of one worker over the host."""

    link_faults: LinkFaults

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> HostJoining:
        """Returns the attempt to join the group of an epoch; with a number it is one in advance."""


class NcclBackend:
    """The groups of `worker`; `meet` returns the meeting of a group by its epoch and own name."""

    def __init__(
        self,
        inner: HostBackend,
        communicators: Communicators,
        worker: int,
        meet: Callable[[int, str], Meeting],
        queue: SideQueue,
        thread: NcclThread,
        last_resort: LastResort,
        *,
        is_audited: bool,
    ):
        self.link_faults = inner.link_faults  # a disturbed link holds no message between GPUs
        self._inner, self._communicators, self._worker, self._meet = inner, communicators, worker, meet
        self._queue, self._thread, self._last_resort, self._is_audited = queue, thread, last_resort, is_audited
        self._left: list[IssueQueue] = []

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> NcclJoining:
        """Returns the attempt to join the group of an epoch; with a number it is one in advance."""
        inner = self._inner.joining(epoch, members, attempt)
        meeting = self._meet(epoch, f"gpus-{epoch}-{attempt}")
        return NcclJoining(inner, meeting, self, members.index(self._worker), in_advance=attempt > 0)

    def transport(self, end: GroupEnd, group_id: bytes, rank: int) -> NcclTransport:
        """Returns the transport of a group whose members have met, and which has no communicator yet."""
        size = len(end.num_sent)
        begin = partial(self._communicators.begin, group_id, rank, size, self._queue)
        given = (end, self._thread, self._queue, begin, self._last_resort, self._left)
        return NcclTransport(*given, is_audited=self._is_audited)

    def new_id(self) -> bytes:
        """Returns the id of a new communicator, which the thread of NCCL makes."""
        made: Future[bytes] = Future()
        self._thread.give(partial(_make, made, self._communicators.new_id))
        return made.result()


def _make(made: Future[bytes], new_id: Callable[[], bytes]) -> None:
    try:
        made.set_result(new_id())
    except RuntimeError as error:
        made.set_exception(error)


class NcclJoining:
    """One attempt to join a group."""

    def __init__(self, inner: HostJoining, meeting: Meeting, backend: NcclBackend, rank: int, *, in_advance: bool):
        self._inner, self._meeting, self._backend, self._rank = inner, meeting, backend, rank
        self._in_advance = in_advance
        self._transport: NcclTransport | None = None
        self._is_abandoned = False

    def join(self) -> NcclTransport:
        """Waits until all members have joined, over NCCL too, and their GPUs are connected unless it is in advance."""
        end = self._inner.join()
        try:
            self._meeting.set(f"{_HERE}-{self._rank}", self._backend.new_id() if self._rank == 0 else b"")
            group_id, *_ = [self._meeting.get(f"{_HERE}-{rank}") for rank in range(len(end.num_sent))]
        except RuntimeError as error:
            raise TransferFailedError(f"meeting for NCCL failed: {error}") from error
        transport = self._transport = self._backend.transport(end, group_id, self._rank)
        if self._is_abandoned:
            transport.abandon()
            raise TransferFailedError("joining the others failed: it was abandoned")
        transport.open(in_advance=self._in_advance)
        return transport

    def abandon(self) -> None:
        """Ends a `join` in another thread."""
        self._is_abandoned = True
        self._inner.abandon()
        self._meeting.give_up()
        if self._transport is not None:
            self._transport.abandon()
