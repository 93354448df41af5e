"""The messages of a group on NCCL under audit: what waits for a key, and whose memory that key has."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.core.errors import InvariantError
from engine.core.ownership import Grid
from engine.models.layers import Tensors
from engine.runtime.device.device import HOST
from engine.runtime.device.side_queue import SideQueue
from engine.runtime.transport.direct_transport import GroupEnd, LinkCuts
from engine.runtime.transport.nccl_library import Communicator
from engine.runtime.transport.nccl_queue import Header, IssueQueue, NcclThread
from engine.runtime.transport.transport import Issued, ProgramPurpose, TensorSpec, program_key

PEER, EPOCH, STEP = 4, 1, 3
TWO = (TensorSpec((2,), torch.float32, False),)
KEYS = [program_key(Grid(2, 4), ProgramPurpose.ACTIVATION, 0, 0, each) for each in (0, 1)]


class AtOnce:
    """Does each task in the thread that gives it, one after another."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def give(self, task: Callable[[], None]) -> None:
        with self._lock:
            task()

    def watch(self, look: Callable[[], bool]) -> None:
        """Looks never."""

    unwatch = watch


class Silent:
    """A communicator over which nothing comes but what the test writes; it keeps no memory alive, as NCCL does."""

    def __init__(self) -> None:
        self.taken: list[weakref.ref[Tensor]] = []
        self.landed: list[threading.Event] = []

    def has_joined(self) -> bool:
        return True

    def connect(self, given_up: Callable[[], bool]) -> Communicator:
        return cast("Communicator", self)

    def receive(self, tensors: Tensors, rank: int) -> None:
        self.taken += map(weakref.ref, tensors)
        self.landed.append(threading.Event())

    def pending(self) -> Any:
        return self.landed[-1]

    def revoke(self) -> None:
        for each in self.landed:
            each.set()

    def abort(self) -> None:
        """Writes no more."""

    def memory(self, number: int) -> Tensor | None:
        gc.collect()
        return self.taken[number]()


class Waiter:
    """A waiter that nobody asks."""

    def wake(self) -> None:
        """Wakes nobody."""


@pytest.fixture(name="end")
def _end() -> GroupEnd:
    return GroupEnd(LinkCuts(cast("Any", Waiter())), (PEER, 7), EPOCH, HOST)


@pytest.fixture(name="silent")
def _silent() -> Silent:
    return Silent()


@pytest.fixture(name="issues")
def _issues(end: GroupEnd, silent: Silent) -> IssueQueue:
    """The messages of an end that takes two with keys, and has asked for the first key."""
    issues = IssueQueue(end, cast("NcclThread", AtOnce()), SideQueue(HOST), {PEER: 0, 7: 1}, lambda: None)
    issues.join(lambda: cast("Any", silent))
    issues.connect()
    issues.expect([(Issued(False, PEER, key, TWO), Header.of(EPOCH, STEP, key)) for key in KEYS])
    return issues


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def came(silent: Silent, number: int, header: Header) -> None:
    """Has the key of a receive come."""
    memory = silent.memory(number)
    assert memory is not None
    memory.copy_(torch.tensor(tuple(header)))
    del memory
    silent.landed[number].set()


@pytest.fixture(name="is_landing")
def _is_landing() -> Callable[[], bool]:
    """Tells whether a landing thread runs that begins from here on; other tests may have left some in this process."""
    others = set(threading.enumerate())
    return lambda: any(each.name == "landing" for each in {*threading.enumerate()} - others)


def test_nothing_is_issued_while_a_key_is_awaited(silent: Silent, issues: IssueQueue, end: GroupEnd) -> None:
    assert len(silent.taken) == 1, "neither the message behind its key nor the next key"
    came(silent, 0, Header.of(EPOCH, STEP, KEYS[0]))
    until(lambda: len(silent.taken) == 3)
    assert silent.memory(0) is None, "the key was compared"
    silent.landed[1].set()
    until(lambda: bool(end.arrived))
    assert len(silent.taken) == 3, "the message of the second key waits for it"
    issues.revoke()


def test_a_wrong_key_ends_all_and_lets_no_message_in(silent: Silent, issues: IssueQueue, end: GroupEnd) -> None:
    came(silent, 0, Header.of(EPOCH, STEP, KEYS[1]))
    until(lambda: end.failed is not None)
    assert isinstance(end.failed, InvariantError)
    assert len(silent.taken) == 1
    issues.revoke()


def test_the_memory_of_a_key_that_does_not_come_stays_until_the_abort(
    is_landing: Callable[[], bool], silent: Silent, issues: IssueQueue
) -> None:
    """NCCL may write into it until then: it was free when the group was left."""
    assert is_landing()
    issues.has_left = True
    issues.revoke()
    until(lambda: not is_landing())
    assert silent.memory(0) is not None
    issues.abort()
    assert silent.memory(0) is None
