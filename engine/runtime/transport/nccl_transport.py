"""The transport over NCCL: the SENDs and RECVs of programs go between GPUs, everything else over the host.

    F and B transfers   the order of the program, without tags: `nccl_queue.py`
    all others          the transport `inner`, which knows tags: sums, logs, streams, heals, validation passes, barriers

Rules: a message that is no transfer of the present program is a mistake, and never reaches NCCL. A group that is formed
in advance joins its ranks meanwhile, and connects them when it is entered. Leaving a group revokes its communicator:
its work ends. The abort, which gives memory free, comes when each member of a later group has sent its first byte
there: by then each has revoked its own. It comes before the first message, for it may wait for the whole device.
Nothing is destroyed, which would wait for others. If a call does not return in time, the worker ends itself, and is one
more verdict.
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
from engine.runtime.ipc.control import Control
from engine.runtime.transport.direct_transport import EndChannel, GroupEnd
from engine.runtime.transport.nccl_library import Communicators, Opening
from engine.runtime.transport.nccl_queue import NUM_FIELDS, Header, IssueQueue, NcclThread, Ready
from engine.runtime.transport.transport import (
    AsideKey,
    Border,
    Channel,
    Issued,
    LinkFaults,
    ProgramKey,
    ProgramPurpose,
    Traffic,
)

ABORT_S = 10.0  # to revoke a communicator, and to abort it
ENDS_ITSELF = "NCCL did not abort the communicator of a group in time"
_WITHOUT_TAGS = frozenset({ProgramPurpose.ACTIVATION, ProgramPurpose.GRADIENT})


def goes_without_tag(key: ProgramKey) -> bool:
    """Returns whether a message goes over NCCL."""
    return key.purpose in _WITHOUT_TAGS


class _BetweenGpus(EndChannel[ProgramKey]):
    """The messages over NCCL."""

    def __init__(self, end: GroupEnd, issues: IssueQueue, is_audited: bool):
        super().__init__(end)
        self._issues, self._is_audited = issues, is_audited
        self._step = 0
        self._sends: frozenset[tuple[int, ProgramKey]] = frozenset()
        self.num_sent = dict.fromkeys(end.num_sent, 0)

    def expect(self, step: int, issued: Sequence[Issued]) -> None:
        """Takes the messages of a program that is about to run."""
        self._step = step
        self._sends = frozenset((each.peer, each.key) for each in issued if each.is_send)
        headers = [self._header_of(each.key) for each in issued]
        self._issues.expect(list(zip(issued, headers, strict=True)))

    def _header_of(self, key: ProgramKey) -> Header | None:
        return Header.of(self._of.epoch, self._step, key) if self._is_audited else None

    def post(self, source: int, key: ProgramKey, border: Border) -> None:
        """Does nothing: the receive has its place in the order of the program."""

    def leaving(self, key: ProgramKey, tensors: Leaving) -> Leaving:
        """Returns the tensors on the device, which they are sent from."""
        return self._of.device.put_all(tensors)

    def send(self, target: int, key: ProgramKey, tensors: Leaving) -> None:
        """Gives a message to its place in the order, or keeps it behind a cut."""
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
    """The messages in program order: each goes one of two ways by its key."""

    def __init__(self, between: _BetweenGpus, over_host: Channel[ProgramKey]):
        self._between, self._over_host = between, over_host
        self.device = between.device

    def _way(self, key: ProgramKey) -> Channel[ProgramKey]:
        return self._between if goes_without_tag(key) else self._over_host

    def post(self, source: int, key: ProgramKey, border: Border) -> None:
        """Posts the receive of one message."""
        self._way(key).post(source, key, border)

    def has_arrived(self, source: int, key: ProgramKey) -> bool:
        """Returns whether `take` would return at once."""
        return self._way(key).has_arrived(source, key)

    def take(self, source: int, key: ProgramKey) -> Tensors:
        """Waits for a message."""
        return self._way(key).take(source, key)

    def take_arrived(self, source: int, key: ProgramKey) -> Tensors | None:
        """Returns the tensors of a message, or None if it has not arrived."""
        return self._way(key).take_arrived(source, key)

    def leaving(self, key: ProgramKey, tensors: Leaving) -> Leaving:
        """Begins to bring the tensors of a message to where it is sent from."""
        return self._way(key).leaving(key, tensors)

    def send(self, target: int, key: ProgramKey, tensors: Leaving) -> None:
        """Starts one message."""
        self._way(key).send(target, key, tensors)


class LastResort(NamedTuple):
    """The way out of NCCL for a worker whose abort does not return: after `abort_s`, `end_worker` gets the reason."""

    end_worker: Callable[[str], None]
    abort_s: float = ABORT_S

    def begin(self) -> threading.Timer:
        """Returns the timer of a call that begins."""
        timer = threading.Timer(self.abort_s, self.end_worker, (ENDS_ITSELF,))
        timer.daemon = True
        timer.start()
        return timer


class NcclTransport:
    """The messages of one group, of which `inner` is the end over the host; `begin` begins to join its communicator.

    `left` are the groups of this worker that are revoked and not aborted; the thread of NCCL changes it.
    """

    def __init__(
        self,
        inner: GroupEnd,
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
        ranks = {each: rank for rank, each in enumerate(inner.num_sent)}
        self._issues = IssueQueue(inner, thread, queue, ranks, self._abort_left)
        self._between = _BetweenGpus(inner, self._issues, is_audited)
        self.in_order: Channel[ProgramKey] = _SplitChannel(self._between, inner.in_order)
        self.aside: Channel[AsideKey] = inner.aside
        self._one_leaves = threading.Lock()

    @property
    def epoch(self) -> int:
        """The epoch of the coming messages."""
        return self._inner.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._inner.epoch = epoch

    @property
    def bytes_sent(self) -> int:
        """The bytes of all messages that were begun here."""
        return self._inner.bytes_sent

    def traffic(self) -> Mapping[int, Traffic]:
        """Returns the numbers of messages by member, both ways together."""
        sent, posted = self._between.num_sent, self._issues.num_posted
        return {
            peer: each._replace(sent=each.sent + sent[peer], posted=each.posted + posted[peer])
            for peer, each in self._inner.traffic().items()
        }

    def expect(self, step: int, issued: Sequence[Issued]) -> None:
        """Takes the transfers of a program that is about to run, in the order in which they are issued."""
        self._between.expect(step, issued)

    def begin(self) -> None:
        """Takes the place of the group before, and begins to connect the GPUs: messages wait for it."""
        self._inner.begin()
        self._thread.give(self._issues.connect)

    def open(self, *, in_advance: bool) -> None:
        """Waits until the ranks have joined and, unless in advance, their GPUs are connected.

        Raises TransferFailedError if that fails, or the group is left.
        """
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
        """Leaves the group at once; the thread of NCCL revokes the communicator, within the time that it has."""
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
        """Leaves the group, in which no message is under way."""
        self.abandon()
        self._thread.give(self._abort_left)


# The backend of NCCL: the groups of one worker, each over the host first, and then between the GPUs of its members.
#
# The members of a group meet over their agent, so all of them are there when its communicator is joined. A group that
# is formed in advance joins it while the present one trains, and connects its GPUs when it is entered.

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


# The meeting of the members of a group: they tell each other values over their links to the agent.
#
#     worker                     agent                        every worker
#     KeyMessage(epoch, key) --> passes it on to each worker  keeps the keys of its newest epoch
#
# Rule: no wait outlasts its epoch or its group, so that a worker leaves a group that never comes together.

_TIMEOUT_S = 1800.0


class AgentMeeting:
    """The meeting of one `group` of an epoch."""

    def __init__(self, control: Control, epoch: int, group: str):
        self._control, self._epoch, self._group = control, epoch, group

    def set(self, key: str, value: bytes) -> None:
        """Tells a value to all workers."""
        self._control.send(KeyMessage(self._epoch, f"{self._group}/{key}", base64.b64encode(value).decode()))

    def get(self, key: str) -> bytes:
        """Waits for a value; raises RuntimeError as soon as the epoch is over or the group is given up."""
        (value,) = self._control.keys.wait(self._epoch, self._group, [key], _TIMEOUT_S)
        return base64.b64decode(value)

    def give_up(self) -> None:
        """Ends the present wait and every later one; any thread may call."""
        self._control.keys.give_up(self._epoch, self._group)
