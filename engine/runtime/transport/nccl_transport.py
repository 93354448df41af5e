"""The transport over NCCL: the SENDs and RECVs of programs go from GPU to GPU, everything else over the host.

    F and B transfers   in program order, without tags: `nccl_queue.py`
    all others          over the transport `inner`, with tags: sums, logs, streams, heals, validation passes, barriers

Rules: a message that is not a transfer of the current program is a bug, and never reaches NCCL. A group that is formed
in advance joins its ranks early, and connects them when it is entered. Leaving a group revokes its communicator, which
stops its work. The abort, which frees memory, follows once every member of a later group has sent its first byte there:
by then each has revoked its own. It precedes the first message, because it may wait for the whole device. Communicators
are never destroyed, which would wait for others. If a call does not return in time, the worker ends itself and is
evicted like any other.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

import torch

from engine.core.errors import TransferFailedError, ensure
from engine.core.messages import KeyMessage
from engine.models.layers import Tensors
from engine.runtime.device.copies import Leaving, tensors_of
from engine.runtime.device.side_queue import SideQueue, moment_now
from engine.runtime.process.control import Control
from engine.runtime.transport.direct_transport import (
    DirectBackend,
    DirectJoining,
    DirectTransport,
    EndChannel,
    GroupEnd,
)
from engine.runtime.transport.nccl_library import Communicators, Opening
from engine.runtime.transport.nccl_queue import NUM_FIELDS, Header, IssueQueue, NcclThread, Ready
from engine.runtime.transport.transport import AsideKey, Border, Channel, Issued, ProgramKey, ProgramPurpose, Traffic

ABORT_S = 10.0  # to revoke a communicator, and to abort it
ENDS_ITSELF = "NCCL did not abort the communicator of a group in time"
_WITHOUT_TAGS = frozenset({ProgramPurpose.ACTIVATION, ProgramPurpose.GRADIENT})  # the messages over NCCL


class _BetweenGpus(EndChannel[ProgramKey]):
    def __init__(self, end: GroupEnd, issues: IssueQueue, is_audited: bool):
        super().__init__(end)
        self._issues, self._is_audited = issues, is_audited
        self._step = 0
        self._sends: frozenset[tuple[int, ProgramKey]] = frozenset()
        self.num_sent = dict.fromkeys(end.num_sent, 0)

    def expect(self, step: int, issued: Sequence[Issued]) -> None:
        self._step = step
        self._sends = frozenset((end.peer, end.key) for end in issued if end.is_send)
        self._issues.expect([(end, self._header_of(end.key)) for end in issued])

    def _header_of(self, key: ProgramKey) -> Header | None:
        return Header.of(self._of.epoch, self._step, key) if self._is_audited else None

    def post(self, source: int, key: ProgramKey, border: Border) -> None:
        """Does nothing: the receive has its place in the order of the program."""

    def leaving(self, key: ProgramKey, tensors: Leaving) -> Leaving:
        """Returns the tensors on the device, from which they are sent."""
        return self._of.device.put_all(tensors)

    def send(self, target: int, key: ProgramKey, tensors: Leaving) -> None:
        """Puts a message into its place in the order, or queues it behind a cut."""
        ensure((target, key) in self._sends, f"{key} to worker {target} is no transfer of this program")
        end = self._of
        self.num_sent[target] += 1
        sent = tuple(tensor.detach().contiguous() for tensor in tensors_of(tensors))
        end.bytes_sent += sum([tensor.nbytes for tensor in sent])
        header = self._header_of(key)
        numbers = None
        if header is not None:
            on_host = end.device.copies.room((NUM_FIELDS,), torch.int64)
            numbers = end.device.put(on_host.copy_(torch.tensor(header, dtype=torch.int64, device="cpu")))
        ready = Ready(sent, numbers, moment_now(end.device))
        begin = partial(self._issues.ready, target, key, ready)
        leave = partial(end.device.copies.when_computed, ready.moment.of, begin, end.fails)
        if target not in end.cuts.there or not end.cuts.keeps(target, leave):
            leave()


class _SplitChannel:
    """The messages in program order; the key decides whether one goes over NCCL or over the host."""

    def __init__(self, between: _BetweenGpus, over_host: Channel[ProgramKey]):
        self._between, self._over_host = between, over_host
        self.device = between.device

    def _way(self, key: ProgramKey) -> Channel[ProgramKey]:
        return self._between if key.purpose in _WITHOUT_TAGS else self._over_host

    def post(self, source: int, key: ProgramKey, border: Border) -> None:
        self._way(key).post(source, key, border)

    def has_arrived(self, source: int, key: ProgramKey) -> bool:
        return self._way(key).has_arrived(source, key)

    def take(self, source: int, key: ProgramKey) -> Tensors:
        return self._way(key).take(source, key)

    def take_arrived(self, source: int, key: ProgramKey) -> Tensors | None:
        return self._way(key).take_arrived(source, key)

    def leaving(self, key: ProgramKey, tensors: Leaving) -> Leaving:
        return self._way(key).leaving(key, tensors)

    def send(self, target: int, key: ProgramKey, tensors: Leaving) -> None:
        self._way(key).send(target, key, tensors)


class LastResort(NamedTuple):
    """The way out for a worker whose abort does not return: after `abort_s`, `end_worker` is called with the reason."""

    end_worker: Callable[[str], None]
    abort_s: float = ABORT_S

    def begin(self) -> threading.Timer:
        """Starts and returns the timer of a call."""
        timer = threading.Timer(self.abort_s, self.end_worker, (ENDS_ITSELF,))
        timer.daemon = True
        timer.start()
        return timer


class NcclTransport:
    """The messages of one group; `inner` is its end over the host, and `begin` starts joining its communicator.

    `left` holds this worker's groups that are revoked and not yet aborted; the NCCL thread changes it.
    """

    def __init__(
        self,
        inner: DirectTransport,
        thread: NcclThread,
        queue: SideQueue,
        begin: Callable[[], Opening],
        last_resort: LastResort,
        left: list[IssueQueue],
        *,
        is_audited: bool,
    ):
        self._inner, self._thread, self._begin, self._last_resort = inner, thread, begin, last_resort
        self._left = left
        ranks = {member: rank for rank, member in enumerate(inner.num_sent)}
        self._issues = IssueQueue(inner, thread, queue, ranks, self._abort_left)
        self._between = _BetweenGpus(inner, self._issues, is_audited)
        self.in_order: Channel[ProgramKey] = _SplitChannel(self._between, inner.in_order)
        self.aside: Channel[AsideKey] = inner.aside
        self._one_leaves = threading.Lock()

    @property
    def epoch(self) -> int:
        """The epoch of the next messages."""
        return self._inner.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._inner.epoch = epoch

    @property
    def bytes_sent(self) -> int:
        """The size of all messages sent from here."""
        return self._inner.bytes_sent

    def traffic(self) -> Mapping[int, Traffic]:
        """Returns the message counts by member, of both ways together."""
        sent, posted = self._between.num_sent, self._issues.num_posted
        return {
            peer: traffic._replace(sent=traffic.sent + sent[peer], posted=traffic.posted + posted[peer])
            for peer, traffic in self._inner.traffic().items()
        }

    def rates(self) -> Mapping[int, int]:
        """Returns the bytes a second of links to workers of other hosts, as far as they are known."""
        return self._inner.rates()

    def expect(self, step: int, issued: Sequence[Issued]) -> None:
        """Accepts the transfers of a program that is about to run, in issue order."""
        self._between.expect(step, issued)

    def begin(self) -> None:
        """Replaces the previous group, and starts connecting the GPUs; messages wait for that."""
        self._inner.begin()
        self._thread.give(self._issues.connect)

    def open(self, *, in_advance: bool) -> None:
        """Waits until the ranks have joined and, unless in advance, are connected; raises TransferFailedError."""
        self._thread.give(partial(self._issues.join, self._begin))
        if in_advance:
            self._issues.has_joined.wait()
        else:
            self._thread.give(self._issues.connect)
            self._issues.has_opened.wait()
        if self._inner.failed is not None:
            raise self._inner.failed
        if self._issues.has_left:
            raise TransferFailedError("the group was left while its GPUs were being connected")

    def release_sent(self) -> None:
        """Releases the messages of a committed step."""
        self._inner.release_sent()
        self._issues.release_sent()

    def abandon(self) -> None:
        """Leaves the group at once; the NCCL thread revokes the communicator before its deadline."""
        with self._one_leaves:
            if self._issues.has_left:
                return
            self._issues.has_left = True
        self._inner.abandon()
        self._thread.give(partial(self._leave, self._last_resort.begin()))

    def _leave(self, timer: threading.Timer) -> None:
        if self._issues.revoke():
            self._left.append(self._issues)
        else:
            self._issues.abort()
        timer.cancel()

    def _abort_left(self) -> None:
        while self._left:
            timer = self._last_resort.begin()
            self._left.pop().abort()
            timer.cancel()

    def close(self) -> None:
        """Leaves the group; no message is in flight."""
        self.abandon()
        self._thread.give(self._abort_left)


# The NCCL backend forms each group over the host first, and then between the GPUs of its members.
#
# The members of a group meet through the agent, so all are present when they join the communicator. A group that is
# formed in advance joins it while the current one trains, and connects its GPUs when it is entered.

_HERE = "here"  # a member, by its rank; the value of the first is the id of the communicator


class Meeting(Protocol):
    """Where the members of one group exchange values."""

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value."""

    def get(self, key: str) -> bytes:
        """Waits for a value; raises RuntimeError after `give_up`."""

    def give_up(self) -> None:
        """Ends every wait; any thread may call."""


class NcclBackend:
    """The groups of `worker`; `meet` returns the meeting of a group by its epoch and name."""

    def __init__(
        self,
        inner: DirectBackend,
        communicators: Communicators,
        worker: int,
        meet: Callable[[int, str], Meeting],
        queue: SideQueue,
        thread: NcclThread,
        last_resort: LastResort,
        *,
        is_audited: bool,
    ):
        self.link_faults = inner.link_faults  # link faults do not affect messages between GPUs
        self._inner, self._communicators, self._worker, self._meet = inner, communicators, worker, meet
        self._queue, self._thread, self._last_resort, self._is_audited = queue, thread, last_resort, is_audited
        self._left: list[IssueQueue] = []

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> NcclJoining:
        """Returns an attempt to join the group of an epoch, in advance if it is numbered."""
        inner = self._inner.joining(epoch, members, attempt)
        meeting = self._meet(epoch, f"gpus-{epoch}-{attempt}")
        return NcclJoining(inner, meeting, self, members.index(self._worker), in_advance=attempt > 0)

    def transport(self, end: DirectTransport, group_id: bytes, rank: int) -> NcclTransport:
        """Returns the transport of a group whose members have met, and which has no communicator yet."""
        begin = partial(self._communicators.begin, group_id, rank, len(end.num_sent), self._queue)
        return NcclTransport(
            end, self._thread, self._queue, begin, self._last_resort, self._left, is_audited=self._is_audited
        )

    def new_id(self) -> bytes:
        """Returns the id of a new communicator, which the NCCL thread creates."""
        new_id: Future[bytes] = Future()

        def create() -> None:
            try:
                new_id.set_result(self._communicators.new_id())
            except RuntimeError as error:
                new_id.set_exception(error)

        self._thread.give(create)
        return new_id.result()


class NcclJoining:
    """One attempt to join a group."""

    may_wait = True

    def __init__(self, inner: DirectJoining, meeting: Meeting, backend: NcclBackend, rank: int, *, in_advance: bool):
        self._inner, self._meeting, self._backend, self._rank = inner, meeting, backend, rank
        self._in_advance = in_advance
        self._transport: NcclTransport | None = None
        self._is_abandoned = False

    def join(self) -> NcclTransport:
        """Waits until all members have joined, also over NCCL, and unless in advance their GPUs are connected."""
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


# The members of a group meet by exchanging values through the agent.
#
#     worker                     agent                             every worker
#     KeyMessage(epoch, key) --> forwards it to every worker       keeps the keys of its newest epoch
#
# Rule: no wait outlasts its epoch or its group, so a worker can leave a group that never forms.

_TIMEOUT_S = 1800.0


class AgentMeeting:
    """The meeting of one `group` of an epoch."""

    def __init__(self, control: Control, epoch: int, group: str):
        self._control, self._epoch, self._group = control, epoch, group

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value to all workers."""
        self._control.send(KeyMessage(self._epoch, f"{self._group}/{key}", base64.b64encode(value).decode()))

    def get(self, key: str) -> bytes:
        """Waits for a value; raises RuntimeError as soon as the epoch is over or the group is given up."""
        (value,) = self._control.keys.wait(self._epoch, self._group, [key], _TIMEOUT_S)
        return base64.b64decode(value)

    def give_up(self) -> None:
        """Ends the current wait and every later one; any thread may call."""
        self._control.keys.give_up(self._epoch, self._group)
