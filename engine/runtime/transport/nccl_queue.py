"""The messages of one group over NCCL, issued in the order of the program (`engine/core/program/issue_order.py`).

    main thread      expect: the messages of a program      ready: a message may be sent
    NCCL thread      issues the next message: a receive at once, a send when it is ready
    landing thread   waits for each receive in turn, and reports its arrival

Rules: a receive has arrived once the device has finished it, provided the group has not been left: an abort ends a
receive too, but its memory is garbage. Under audit, the key of a message is sent first, as its own message, and nothing
else is issued until it has been compared, so a wrong message never reaches memory. A sent message keeps its memory
until a later receive is done, or until the commit. An error of this worker's own device ends the worker; any other is a
suspicion, of the peer if there is one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.core.errors import InvariantError, TransferFailedError
from engine.models.layers import Tensors
from engine.runtime.device.device import device_trouble
from engine.runtime.device.missing_gradients import look_at
from engine.runtime.device.side_queue import QueueMoment, SideQueue
from engine.runtime.process.kernel import inside
from engine.runtime.transport.direct_transport import GroupEnd
from engine.runtime.transport.nccl_library import Communicator, Opening, PendingWork
from engine.runtime.transport.transport import Issued, ProgramKey, ProgramPurpose

NUM_FIELDS: Final = 6
_LETTERS = {ProgramPurpose.ACTIVATION: "F", ProgramPurpose.GRADIENT: "B"}


class Header(NamedTuple):
    """The header of a message under audit: its key, epoch and step as numbers, which the receiver compares."""

    epoch: int
    step: int
    purpose: int
    pipeline: int
    stage: int
    microbatch: int

    @classmethod
    def of(cls, epoch: int, step: int, key: ProgramKey) -> Header:
        """Returns the header of a message."""
        return cls(epoch, step, int(key.purpose), key.pipeline, key.stage, key.item)

    def __str__(self) -> str:
        letters = {int(purpose): letter for purpose, letter in _LETTERS.items()}
        if self.purpose not in letters:
            return f"a message that is none {tuple(self)}"
        action = f"{self.stage}SEND_{letters[self.purpose]}{self.microbatch}"
        return f"{action} of pipeline {self.pipeline}, step {self.step}, epoch {self.epoch}"


# The only thread of a worker that calls NCCL, for all of its communicators: two threads must not be in NCCL at once.
#
# It runs its tasks in order, so an epoch's communicator is aborted before the next one is connected. Between tasks it
# polls its communicators: whether the ranks of one have joined, and whether the current one has failed.

_POLL_S = 0.1
_POLL_WHILE_JOINING_S = 0.001
Look = Callable[[], bool]  # whether ranks are joining


class NcclThread:
    """One worker's tasks for NCCL; its sockets are in the `network` namespace of the run, if there is one."""

    def __init__(self, name: str, network: int | None = None):
        self._name, self._network = name, network
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._looks: list[Look] = []
        self._due_s = 0.0  # of the next look, by the clock

    def give(self, task: Callable[[], None]) -> None:
        """Runs a task after all earlier ones; any thread may call."""
        self._tasks.put(task)
        with self._starting:
            if self._thread is None:  # a worker that is waiting for its first group needs none
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def watch(self, look: Look) -> None:
        """Calls `look` regularly; must be called by this thread."""
        self._looks.append(look)
        self._due_s = 0.0

    def unwatch(self, look: Look) -> None:
        """Stops calling `look`; must be called by this thread."""
        self._looks = [other for other in self._looks if other != look]

    def end(self) -> None:
        """Ends the thread after its tasks."""
        self._tasks.put(None)

    def _run(self) -> None:
        with contextlib.nullcontext() if self._network is None else inside(self._network):
            while True:
                left_s = self._due_s - time.monotonic()
                if left_s <= 0:
                    _done(self._look)
                    continue
                try:
                    task = self._tasks.get(timeout=left_s)
                except queue.Empty:
                    continue
                if task is None:
                    return
                _done(task)
                del task

    def _look(self) -> None:
        self._due_s = time.monotonic() + _POLL_S
        are_joining = [look() for look in self._looks]
        if any(are_joining):
            self._due_s = time.monotonic() + _POLL_WHILE_JOINING_S


def _done(task: Callable[[], None]) -> None:
    try:
        task()
    except Exception:  # a bug in bamboo; the thread must survive to abort
        traceback.print_exc()


_BROKEN = "transfer between GPUs failed"

_Address = tuple[int, ProgramKey]  # the target of a message, and its key


class Ready(NamedTuple):
    """A message that may be sent after a moment of the compute stream; `header` is None without an audit."""

    tensors: Tensors
    header: Tensor | None
    moment: QueueMoment


class _Landing(NamedTuple):
    """An issued receive; `landed` is called when it is done."""

    pending: PendingWork
    landed: Callable[[], None]


class IssueQueue:
    """The messages of a group of these `ranks`; calls `connected` when all members have sent their first byte."""

    def __init__(
        self,
        end: GroupEnd,
        thread: NcclThread,
        queue_of_device: SideQueue,
        ranks: Mapping[int, int],
        connected: Callable[[], None],
    ):
        self._end, self._thread, self._queue, self._ranks = end, thread, queue_of_device, ranks
        self._connected = connected
        self._has_worked = False
        self._opening: Opening | None = None
        self._communicator: Communicator | None = None
        self._revoked: Opening | Communicator | None = None
        self._ahead: deque[tuple[Issued, Header | None]] = deque()
        self._ready: dict[_Address, Ready] = {}
        self._sent: deque[tuple[int, Ready]] = deque()  # (number, message)
        self._num_sent = 0
        self._received: dict[_Address, Tensors] = {}  # until they have arrived
        self._comparing: Tensor | None = None  # the memory of an expected header
        self._landings: queue.SimpleQueue[_Landing | None] = queue.SimpleQueue()
        self._is_entered = False
        self.has_left = False
        self.has_joined = threading.Event()  # or failed to
        self.has_opened = threading.Event()  # or failed to
        self.num_posted = dict.fromkeys(ranks, 0)

    # The main thread

    def expect(self, ends: Sequence[tuple[Issued, Header | None]]) -> None:
        """Adds the messages of a program, in issue order."""
        self._thread.give(partial(self._expect, tuple(ends)))

    def ready(self, target: int, key: ProgramKey, ready: Ready) -> None:
        """Accepts a message that may be sent when its turn comes; a timer calls this too."""

        def add() -> None:
            self._ready[target, key] = ready
            self._go_on()

        self._thread.give(add)

    def release_sent(self) -> None:
        """Releases the messages sent so far."""
        self._thread.give(self._sent.clear)

    # The NCCL thread

    def join(self, begin: Callable[[], Opening]) -> None:
        """Starts joining the ranks; fails all transfers if that fails."""
        if not self.has_left:
            with self._as_opening():
                self._queue.enter()
                self._queue.leave_room()  # NCCL needs memory that torch may be caching
                self._opening = begin()
                self._thread.watch(self._look)

    def connect(self) -> None:
        """Connects the ranks once they have joined: no other communicator of this worker is active any more."""
        self._is_entered = True
        self._open()

    def revoke(self) -> bool:
        """Stops the work of the communicator; returns whether it had any, which other ranks may still be in."""
        self._thread.unwatch(self._look)
        current = self._communicator or self._opening
        if has_worked := current is not None and self._has_worked:
            current.revoke()
        self._communicator, self._opening, self._revoked = None, None, current
        self._landings.put(None)
        self.has_joined.set()
        self.has_opened.set()
        self._ahead.clear()
        self._ready.clear()
        return has_worked

    def abort(self) -> None:
        """Aborts the communicator, if there is one, after `revoke`."""
        if self._revoked is not None:
            self._revoked.abort()
        self._revoked = None
        self._sent.clear()
        self._received, self._comparing = {}, None  # not earlier: NCCL might have written to them

    def _open(self) -> None:
        if self._opening is None or self._communicator is not None or self.has_left or self._end.failed:
            return
        with self._as_opening():
            if not self._opening.has_joined():
                return
            self.has_joined.set()
            if not self._is_entered:
                return
            self._has_worked = True
            self._communicator = self._opening.connect(lambda: self.has_left)
            self._connected()
            threading.Thread(target=self._land, name="landing", daemon=True).start()
            self.has_opened.set()
        self._go_on()

    @contextlib.contextmanager
    def _as_opening(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._breaks("connecting the GPUs failed", error)
            self.has_joined.set()
            self.has_opened.set()

    def _expect(self, ends: Sequence[tuple[Issued, Header | None]]) -> None:
        if self._ahead or self._ready:
            left = f"{len(self._ahead)} messages to issue and {len(self._ready)} that nobody issues"
            self._fails(InvariantError(f"a program begins, and the one before it has left {left}"))
            return
        self._ahead.extend(ends)
        self._go_on()

    def _go_on(self) -> None:
        """Issues messages up to the first that is not ready."""
        try:
            while self._ahead and self._communicator is not None:
                if self._comparing is not None or self.has_left or self._end.failed:
                    break
                if not self._issue(self._communicator, *self._ahead[0]):
                    break
                self._ahead.popleft()
        except RuntimeError as error:
            self._breaks(_BROKEN, error, self._ahead[0][0].peer)

    def _issue(self, communicator: Communicator, issued: Issued, header: Header | None) -> bool:
        rank = self._ranks[issued.peer]
        if issued.is_send:
            ready = self._ready.pop((issued.peer, issued.key), None)
            if ready is None:
                return False
            self._queue.behind(ready.moment)
            self._queue.lend((*ready.tensors, *(() if ready.header is None else (ready.header,))))
            self._num_sent += 1
            self._sent.append((self._num_sent, ready))
            if ready.header is not None:
                communicator.send((ready.header,), rank)
            communicator.send(ready.tensors, rank)
            return True
        self.num_posted[issued.peer] += 1
        if header is None:
            self._receive(communicator, issued)
            return True
        numbers = self._comparing = self._queue.room((NUM_FIELDS,), torch.int64)
        communicator.receive((numbers,), rank)
        self._landings.put(_Landing(communicator.pending(), partial(self._header_landed, issued, header, numbers)))
        return True

    def _receive(self, communicator: Communicator, issued: Issued) -> None:
        tensors = tuple(self._queue.room(spec.shape, spec.dtype) for spec in issued.border)
        self._received[issued.peer, issued.key] = tensors
        communicator.receive(tensors, self._ranks[issued.peer])
        landed = partial(self._landed, issued, tensors, self._num_sent)
        self._landings.put(_Landing(communicator.pending(), landed))

    def _release(self, num_sent: int) -> None:
        while self._sent and self._sent[0][0] <= num_sent:
            self._sent.popleft()

    def _compare(self, issued: Issued, expected: Header, header: Header) -> None:
        self._comparing = None
        if header != expected:
            self._fails(InvariantError(f"worker {issued.peer} was asked for {expected}: {header} came"))
        elif self._communicator is not None and not self.has_left:
            try:
                self._receive(self._communicator, issued)
            except RuntimeError as error:
                self._breaks(_BROKEN, error, issued.peer)
            self._go_on()

    def _look(self) -> bool:
        """Checks on joining ranks, and then for failures; returns whether ranks are still joining."""
        self._open()
        try:
            if self._communicator is not None and not self.has_left and (failure := self._communicator.failure()):
                self._fails(TransferFailedError(f"transfers between GPUs failed: {failure}"))
        except RuntimeError as error:
            self._breaks("transfers between GPUs failed", error)
        return not self.has_joined.is_set()

    def _breaks(self, what: str, error: RuntimeError, peer: int | None = None) -> None:
        """Fails all transfers with an error of NCCL, or of the device."""
        self._fails(error if device_trouble(error) else TransferFailedError(f"{what}: {error}", peer))

    def _fails(self, error: Exception) -> None:
        if not self.has_left and self._end.failed is None:
            self._end.fails(error)

    # The landing thread

    def _land(self) -> None:
        self._queue.enter()
        while (landing := self._landings.get()) is not None:
            try:
                landing.pending.wait()
                if self.has_left:
                    return
                landing.landed()
            except RuntimeError as error:
                self._breaks("waiting for a transfer between GPUs failed", error)
                return
            del landing

    def _header_landed(self, issued: Issued, header: Header, numbers: Tensor) -> None:
        self._thread.give(partial(self._compare, issued, header, Header(*self._queue.read(numbers))))

    def _landed(self, issued: Issued, tensors: Tensors, num_sent: int) -> None:
        """Accepts a message; the first `num_sent` messages of this end have been sent, as both use one queue."""
        self._thread.give(partial(self._release, num_sent))
        self._received.pop((issued.peer, issued.key), None)
        if issued.key.purpose is ProgramPurpose.GRADIENT:
            with self._queue.reading():
                look_at(tensors)
        self._end.arrives(issued.peer, issued.key, tuple(map(self._queue.hand_over, tensors)))
        self._end.cuts.waiter.wake()
