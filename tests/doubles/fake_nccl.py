"""NCCL without GPUs: communicators in memory that keep its rules, and worse ones that it allows.

- No tags: the n-th receive of a rank from another takes the n-th send of that one to it, whatever both mean.
- Each rank has one queue, and its head waits for the other end: an order that NCCL could not do stands still here.
- A tensor is read and written when both ends have come, not when the call is made.
- A peer that dies gives no error. To revoke is local; it ends receives too, whose memory then holds garbage.
- A call of a worker that `stands` names does not return.
- One thread of a worker calls. A communicator joins beside one other, and is connected when that one is revoked. One
  that was at work is revoked before it is aborted, and not aborted while a member of the present group has not revoked
  its own, or anybody else where `nobody_dies`. A call that breaks this is noted in `wrongs`. A worker that ends should
  have aborted all; those left are in `left_behind`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

from torch import Tensor

from engine.models.layers import Tensors
from engine.runtime.device.device import Device
from engine.runtime.device.side_queue import QueueMoment, SideQueue
from engine.runtime.transport.nccl_queue import NcclThread
from engine.runtime.transport.nccl_transport import ABORT_S, LastResort, NcclBackend, NcclJoining, NcclTransport
from engine.runtime.transport.transport import bytes_of
from engine.runtime.worker.thread_worker import ThreadBackend, ThreadControl
from engine.runtime.worker.worker import tell_end

_Call = Literal["begin", "connect", "revoke", "abort"]
_GARBAGE = 0xA5
_TIMEOUT_S = 30.0


class FakeNccl:
    """The NCCL of all workers of a run; `wrongs` are calls against its rules, `num_sent` what has been transferred."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.groups: dict[bytes, _FakeGroup] = {}
        self.wrongs: list[str] = []
        self.num_sent = 0
        self.num_revoked = self.num_aborted = 0
        self.nobody_dies = False
        self.num_aside = 0  # communicators that began to join while another one was at work
        self.left_behind: set[int] = set()  # workers that did not abort a communicator before their end
        self.ended: list[str] = []  # the reasons of workers that ended themselves
        self.stands: dict[int, tuple[_Call, int]] = {}  # worker -> its call, and which of them
        self.open_s, self.abort_s = _TIMEOUT_S, ABORT_S  # the deadlines of a worker
        self.absent: set[int] = set()  # workers of whose beginning to join no other one hears
        self._told: dict[object, dict[str, bytes]] = {}

    def meeting(self, place: object, epoch: int, name: str) -> _MeetingDouble:
        """Returns the meeting of a group; those of one `place` see each other."""
        with self.lock:
            return _MeetingDouble(self.lock, self._told.setdefault((place, epoch, name), {}))


class _MeetingDouble:
    def __init__(self, lock: threading.Condition, told: dict[str, bytes]):
        self._lock, self._told, self._is_over = lock, told, False

    def set(self, key: str, value: bytes) -> None:
        """Tells a value."""
        with self._lock:
            self._told[key] = value
            self._lock.notify_all()

    def get(self, key: str) -> bytes:
        """Waits for a value."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_over or key in self._told, _TIMEOUT_S)
            if key not in self._told:
                raise RuntimeError(f"{key} was not told")
            return self._told[key]

    def give_up(self) -> None:
        """Ends every wait."""
        with self._lock:
            self._is_over = True
            self._lock.notify_all()


class _Work:
    """One operation in the queue of a rank, or the end of it."""

    def __init__(self, is_send: bool, peer: int, tensors: Tensors):
        self.is_send, self.peer, self.tensors = is_send, peer, tensors
        self.is_done = threading.Event()
        self._moment: QueueMoment | None = None

    def ends(self, moment: QueueMoment | None = None) -> None:
        """Ends the work, on a device behind a moment of its queue."""
        self._moment = moment
        self.is_done.set()

    def wait(self) -> None:
        """Waits until the work is done or aborted."""
        self.is_done.wait()
        if self._moment is not None:
            self._moment.wait()


class _FakeGroup:
    """The queues of the ranks of one group; the lock of the run guards them."""

    def __init__(self, size: int):
        self.queues: list[deque[_Work]] = [deque() for _ in range(size)]
        self.of_device: dict[int, SideQueue] = {}
        self.connecting: dict[int, int] = {}  # rank -> worker
        self.left: set[int] = set()
        self.begun_s = time.monotonic()

    def meet(self, nccl: FakeNccl) -> None:
        """Transfers between all heads that wait for each other."""
        moves = True
        while moves:
            moves = False
            for rank, queue in enumerate(self.queues):
                if not queue or not queue[0].is_send or queue[0].peer in self.left or rank in self.left:
                    continue
                others = self.queues[queue[0].peer]
                if others and not others[0].is_send and others[0].peer == rank:
                    sent, received = queue.popleft(), others.popleft()
                    source, target = self.of_device[rank], self.of_device[sent.peer]
                    target.behind(source.moment())
                    with target.given():
                        _transfer(nccl, sent.tensors, received.tensors)
                    source.behind(target.moment())
                    sent.ends(source.moment())
                    received.ends(target.moment())
                    moves = True


def _transfer(nccl: FakeNccl, sent: Tensors, received: Tensors) -> None:
    nccl.num_sent += 1
    sizes = [each.nbytes for each in sent], [each.nbytes for each in received]
    if sizes[0] != sizes[1]:
        nccl.wrongs.append(f"a message of {sizes[0]} bytes met a receive of {sizes[1]}")
        return
    for source, target in zip(sent, received, strict=True):
        _bytes(target).copy_(_bytes(source))


def _bytes(tensor: Tensor) -> Tensor:
    return bytes_of(tensor.detach())


class FakeCommunicator:
    """One end of a group in memory."""

    def __init__(self, owner: FakeCommunicators, group: _FakeGroup, rank: int):
        self._owner, self._group, self._rank = owner, group, rank
        self._last = _Work(True, rank, ())
        self._last.ends()

    def _give(self, work: _Work) -> None:
        self._owner.is_called()
        nccl = self._owner.nccl
        with nccl.lock:
            if self._rank in self._group.left:
                nccl.wrongs.append(f"rank {self._rank} gives work to a communicator that it has aborted")
            self._last = work
            self._group.queues[self._rank].append(work)
            self._group.meet(nccl)

    def send(self, tensors: Tensors, rank: int) -> None:
        """Gives tensors to a rank."""
        self._give(_Work(True, rank, tensors))

    def receive(self, tensors: Tensors, rank: int) -> None:
        """Fills tensors with those of the next send of a rank."""
        self._give(_Work(False, rank, tensors))

    def pending(self) -> _Work:
        """Returns the end of all work so far."""
        return self._last

    def failure(self) -> str:
        """Returns nothing, whoever has died."""
        self._owner.is_called()
        return ""

    def revoke(self) -> None:
        """Ends all work here; the other ranks do not notice."""
        self._owner.is_called()
        nccl = self._owner.nccl
        self._owner.comes_to("revoke")
        with nccl.lock:
            self._group.left.add(self._rank)
            nccl.num_revoked += 1
            for work in self._group.queues[self._rank]:
                for tensor in () if work.is_send else work.tensors:
                    _bytes(tensor).fill_(_GARBAGE)
                work.ends()
            if self._owner.at_work is self._group:
                self._owner.at_work = None

    def abort(self) -> None:
        """Gives its memory free, in which other ranks may be at work."""
        owner, group = self._owner, self._group
        owner.is_called()
        owner.comes_to("abort")
        with owner.nccl.lock:
            owner.nccl.num_aborted += 1
            owner.unfinished.discard(group)
            at_work = {worker for rank, worker in group.connecting.items() if rank not in group.left}
            if owner.at_work is not None and not owner.nccl.nobody_dies:
                at_work &= {owner.worker, *owner.at_work.connecting.values()}
            elif not owner.nccl.nobody_dies:
                at_work &= {owner.worker}
            if at_work:
                owner.nccl.wrongs.append(f"worker {owner.worker} aborts under the work of {sorted(at_work)}")


class FakeOpening(FakeCommunicator):
    """One end of a group that others join."""

    def has_joined(self) -> bool:
        """Returns whether all ranks have come."""
        self._owner.is_called()
        with self._owner.nccl.lock:
            has_joined = len(self._group.of_device) == len(self._group.queues)
        if not has_joined and time.monotonic() > self._group.begun_s + self._owner.nccl.open_s:
            raise RuntimeError("the others did not join")
        return has_joined

    def connect(self, is_given_up: Callable[[], bool]) -> FakeCommunicator:
        """Waits until all ranks connect."""
        owner, group = self._owner, self._group
        owner.is_called()
        owner.comes_to("connect")
        if owner.at_work is not None:
            owner.nccl.wrongs.append(f"worker {owner.worker} has two communicators at work")
        until_s = time.monotonic() + owner.nccl.open_s
        with owner.nccl.lock:
            group.connecting[self._rank] = owner.worker
            owner.nccl.lock.notify_all()
            while len(group.connecting) < len(group.queues):
                if is_given_up() or time.monotonic() > until_s:
                    raise RuntimeError("the others did not connect")
                owner.nccl.lock.wait(0.005)
            owner.at_work = group
        return self


class FakeCommunicators:
    """The communicators of one worker."""

    def __init__(self, nccl: FakeNccl, worker: int):
        self.nccl, self.worker = nccl, worker
        self.unfinished: set[_FakeGroup] = set()
        self.at_work: _FakeGroup | None = None
        self._thread = 0
        self._num_calls = Counter[str]()

    def comes_to(self, call: _Call) -> None:
        """Stands in a call, if it is to."""
        self._num_calls[call] += 1
        while self.nccl.stands.get(self.worker) == (call, self._num_calls[call]):
            time.sleep(0.005)

    def is_called(self) -> None:
        """Notes a call from another thread than the one that called before."""
        thread = threading.get_ident()
        if self._thread not in (0, thread):
            self.nccl.wrongs.append(f"two threads of worker {self.worker} are in NCCL")
        self._thread = thread

    def new_id(self) -> bytes:
        """Returns the id of a new group."""
        self.is_called()
        with self.nccl.lock:
            return str(len(self.nccl.groups) + self.nccl.num_sent).encode() + bytes([self.worker])

    def begin(self, group_id: bytes, rank: int, size: int, queue: SideQueue) -> FakeOpening:
        """Begins to join a group."""
        self.is_called()
        self.comes_to("begin")
        nccl = self.nccl
        with nccl.lock:
            group = nccl.groups.setdefault(group_id, _FakeGroup(size))
            if self.worker not in nccl.absent:
                group.of_device[rank] = queue
            nccl.num_aside += self.at_work is not None
        if others := {each for each in self.unfinished if not each.connecting} - {self.at_work}:
            nccl.wrongs.append(f"worker {self.worker} has not aborted {len(others)} communicators of no use")
        self.unfinished.add(group)
        return FakeOpening(self, group, rank)

    def leave(self) -> None:
        """Notes communicators that nobody has aborted."""
        if self.unfinished:
            self.nccl.left_behind.add(self.worker)


Paused = Callable[[], AbstractContextManager[None]]


class NcclBesideLinks(NcclBackend):
    """The transport over NCCL of a worker that is a thread: its other messages go over links."""

    def __init__(
        self, nccl: FakeNccl, life: object, control: ThreadControl, worker: int, device: Device, **of_job: bool
    ):
        self._over_links = ThreadBackend(life, control, worker, device, **of_job)
        self._paused, self._of_nccl = control.turn.paused, NcclThread(f"nccl of worker {worker}")
        self._transports: list[NcclTransport] = []
        self._own = FakeCommunicators(nccl, worker)
        self._nccl, self._name, self._has_left = nccl, device.name, threading.Event()
        super().__init__(
            self._over_links,
            self._own,
            worker,
            partial(nccl.meeting, life),
            SideQueue(device),
            self._of_nccl,
            LastResort(partial(self._end, control), nccl.abort_s),
            is_audited=True,
        )

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> _PausedJoining:  # type: ignore[override]
        """Returns the attempt to join a group, during which other workers have their turns."""
        return _PausedJoining(super().joining(epoch, members, attempt), self._paused)

    def transport(self, *given: Any) -> NcclTransport:
        """Returns the transport of a group."""
        self._transports.append(super().transport(*given))
        return self._transports[-1]

    def _end(self, waiter: Any, why: str) -> None:
        self._nccl.ended.append(why)
        if isinstance(waiter, ThreadControl):
            with contextlib.suppress(OSError):  # its worker has ended meanwhile
                tell_end(waiter, self._name, why)
            waiter.kill()

    def leave(self) -> None:
        """Ends what the end of the process would end."""
        self._over_links.leave()
        self._of_nccl.give(self._own.leave)
        self._of_nccl.give(self._has_left.set)
        for each in list(self._transports):
            each.abandon()
        self._of_nccl.end()

    def close(self) -> None:
        """Closes the links, and waits for the calls of the thread of NCCL, unless one is to stand."""
        self._over_links.close()
        if self._own.worker not in self._nccl.stands:
            self._has_left.wait(_TIMEOUT_S)


class _PausedJoining:
    may_wait = True

    def __init__(self, inner: NcclJoining, paused: Paused):
        self._inner, self._paused, self.abandon = inner, paused, inner.abandon

    def join(self) -> NcclTransport:
        """Waits until all members have joined."""
        with self._paused():
            return self._inner.join()
