"""The shipped calls of NCCL against a strict double of its library: what it does, and which calls it counts as broken.

Each rank has a copy of the library and one thread for it, as a process has. Runs of real processes over the same double
are in `tests/e2e/test_nccl_kills.py`.
"""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from engine.runtime.device.device import HOST
from engine.runtime.transport.nccl_library import NcclCommunicator, NcclCommunicators, NcclLibrary, NcclOpening
from tests.doubles.nccl_double import EAGER, WHY_NOT, Double
from tests.doubles.nccl_on_host import DoubleQueue

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

_Found = TypeVar("_Found")
_PATIENCE_S = 20.0
GARBAGE = 0xA5
IN_PROGRESS = 7
ROOM = torch.zeros(1, device="cpu")


class Rank:
    """One rank: its copy of the library, its queue and its thread."""

    def __init__(self, path: Path, number: int):
        self.number = number
        self.library = NcclLibrary(str(path))
        self.queue = DoubleQueue(HOST, path)
        self.communicators = NcclCommunicators(self.library)
        self._held: list[object] = []
        self._thread = ThreadPoolExecutor(1, f"nccl of rank {number}")

    def begin(self, call: Callable[..., _Found], *given: Any) -> Future[_Found]:
        """Begins a call in the thread of the rank, and holds what is given: work for a queue is done later."""
        self._held.append(given)
        return self._thread.submit(call, *given)

    def do(self, call: Callable[..., _Found], *given: Any) -> _Found:
        """Returns what a call in the thread of the rank returns."""
        return self.begin(call, *given).result(_PATIENCE_S)

    def join(self, group_id: bytes, size: int) -> NcclCommunicator:
        """Joins a group, in the thread of the rank."""
        opening = self.communicators.begin(group_id, self.number, size, self.queue)
        until(opening.has_joined)
        return opening.connect(lambda: False)

    def end(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def until(is_so: Callable[[], object]) -> None:
    since_s = time.monotonic()
    while not is_so():
        assert time.monotonic() < since_s + _PATIENCE_S
        time.sleep(0.001)


class Ranks:
    """The ranks of a test, and the double that all of them use."""

    def __init__(self, double: Double):
        self.double = double
        self.all: list[Rank] = []

    def of(self, size: int) -> list[Rank]:
        """Returns new ranks."""
        with self.double.in_environment():
            self.all = [Rank(self.double.copy(), number) for number in range(size)]
        return self.all

    def start_anew(self) -> None:
        """Replaces the ranks, as processes that end and others that start."""
        for each in self.all:
            each.queue.go_on()
            each.end()
        self.all.clear()

    def joined(self, size: int) -> list[NcclCommunicator]:
        """Returns a communicator of all ranks, which have joined it at once."""
        ranks = self.all or self.of(size)
        group_id = ranks[0].do(ranks[0].communicators.new_id)
        return [each.result(_PATIENCE_S) for each in [rank.begin(rank.join, group_id, size) for rank in ranks]]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(Double(tmp_path / "double"))
    yield found
    found.start_anew()


def numbers(length: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + length, dtype=torch.float32, device="cpu")


def test_messages_arrive_in_their_order_short_and_long_ones(ranks: Ranks) -> None:
    (one, two), (to_two, to_one) = ranks.of(2), ranks.joined(2)
    sent = [(numbers(1),), (numbers(2 * EAGER, 5),), (numbers(3, 1), numbers(0), numbers(7, 2).bfloat16())] * 3
    for each in sent:
        one.begin(to_two.send, each, 1)
    room = [tuple(torch.empty_like(each) for each in message) for message in sent]
    for message in room:
        two.do(to_one.receive, message, 0)
    to_one.pending().wait()
    assert all(torch.equal(a, b) for x, y in zip(sent, room, strict=True) for a, b in zip(x, y, strict=True))
    assert [one.do(to_two.failure), two.do(to_one.failure)] == ["", ""]
    for rank, communicator in ((one, to_two), (two, to_one)):
        rank.do(communicator.abort)
    assert ranks.double.offences() == []
    counts = ranks.double.counts()
    assert (counts["joins"], counts["eager"], counts["rendezvous"], counts["aborts"]) == (2, 9 + 2, 3, 2)


def test_a_short_message_leaves_before_its_receive_and_a_long_one_does_not(ranks: Ranks) -> None:
    (one, two), (to_two, to_one) = ranks.of(2), ranks.joined(2)
    one.do(to_two.send, (numbers(EAGER // 4 - 1),), 1)
    to_two.pending().wait()
    one.do(to_two.send, (numbers(EAGER // 4),), 1)
    moment = to_two.pending()
    time.sleep(0.02)
    assert not moment.has_come()
    for length in (EAGER // 4 - 1, EAGER // 4):
        two.do(to_one.receive, (numbers(length),), 0)
    moment.wait()
    assert ranks.double.offences() == []


def test_work_is_on_its_queue_after_the_call_has_returned_and_settled(ranks: Ranks) -> None:
    """A moment that is asked for before is an earlier one: behind it memory would be read that is not filled."""
    (one, two), (to_two, to_one) = ranks.of(2), ranks.joined(2)

    def too_early() -> bool:
        library = two.library
        library.begin_group()
        library.receive(to_one._own, ROOM.data_ptr(), 4, 0, two.queue.handle)
        library.end_group()
        at_once = two.queue.moment().has_come()
        library.settled(to_one._own, time.monotonic() + _PATIENCE_S, lambda: False)
        return at_once and not two.queue.moment().has_come()

    assert two.do(too_early)
    one.do(to_two.send, (numbers(1),), 1)
    to_one.pending().wait()
    assert ranks.double.offences() == []


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "silent"])
def test_the_end_of_a_peer_is_told_or_not_and_an_abort_leaves_garbage(ranks: Ranks, is_told: bool) -> None:
    ranks.double.has_modes(tells_deaths=is_told)
    (one, two), (to_two, to_one) = ranks.of(2), ranks.joined(2)
    room = numbers(4)
    two.do(to_one.receive, (room,), 0)
    one.do(to_two.abort)
    if is_told:
        until(lambda: two.do(to_one.failure))
        assert "remote process exited" in two.do(to_one.failure)
        with pytest.raises(RuntimeError, match="remote process exited"):
            two.do(to_one.send, (numbers(1),), 0)
    time.sleep(0.02)
    moment = to_one.pending()
    assert not moment.has_come()
    assert bool(two.do(to_one.failure)) == is_told
    two.do(to_one.abort)
    moment.wait()
    assert bytes(room.numpy().tobytes()) == bytes([GARBAGE] * 16)
    assert ranks.double.offences() == []


def test_a_join_needs_all_ranks_and_can_be_aborted(ranks: Ranks) -> None:
    one = ranks.of(1)[0]
    opening = one.do(one.communicators.begin, one.do(one.communicators.new_id), 0, 2, one.queue)
    time.sleep(0.02)
    assert not one.do(opening.has_joined)
    one.do(opening.abort)
    assert ranks.double.offences() == []


def test_pairs_are_connected_by_their_first_message_when_both_have_called(ranks: Ranks) -> None:
    one, two = ranks.of(2)
    group_id = one.do(one.communicators.new_id)
    openings = [each.begin(each.communicators.begin, group_id, each.number, 2, each.queue) for each in (one, two)]
    first, second = (each.result(_PATIENCE_S) for each in openings)
    for rank, opening in ((one, first), (two, second)):
        until(lambda rank=rank, opening=opening: rank.do(opening.has_joined))  # type: ignore[misc]
    connecting = one.begin(first.connect, lambda: False)
    time.sleep(0.05)
    assert not connecting.done()
    two.do(second.connect, lambda: False)
    connecting.result(_PATIENCE_S)
    assert ranks.double.offences() == []


def test_the_first_bytes_are_kept_while_nccl_may_use_them(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory was free when a connection was given up, and NCCL wrote into it before the abort."""
    one, opening = opened(ranks)
    rooms: list[weakref.ref[Tensor]] = []
    room = one.queue.room

    def noted(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = room(shape, dtype)
        rooms.append(weakref.ref(made))
        return made

    monkeypatch.setattr(one.queue, "room", noted)
    with pytest.raises(RuntimeError, match="given up"):
        one.do(opening.connect, lambda: True)
    gc.collect()
    assert [each() is None for each in rooms] == [False]
    one.do(opening.abort)


def test_an_abort_waits_for_the_device(ranks: Ranks) -> None:
    one, communicator = ranks.of(1)[0], ranks.joined(1)[0]
    one.queue.stand()
    aborting = one.begin(communicator.abort)
    time.sleep(0.05)
    assert not aborting.done()
    one.queue.go_on()
    aborting.result(_PATIENCE_S)
    assert ranks.double.offences() == []


def opened(ranks: Ranks) -> tuple[Rank, NcclOpening]:
    """Returns the first of two ranks, and its opening of a group that both have joined and none has connected."""
    one, two = ranks.all or ranks.of(2)
    group_id = one.do(one.communicators.new_id)
    found = [each.begin(each.communicators.begin, group_id, each.number, 2, each.queue) for each in (one, two)]
    openings = [each.result(_PATIENCE_S) for each in found]
    for rank, opening in zip((one, two), openings, strict=True):
        until(lambda rank=rank, opening=opening: rank.do(opening.has_joined))  # type: ignore[misc]
    return one, openings[0]


def test_a_call_from_a_second_thread_is_caught(ranks: Ranks) -> None:
    ranks.joined(1)[0].failure()
    assert ranks.double.offences() == ["ncclCommGetAsyncError from a second thread"]


def test_two_communicators_in_one_group_are_caught(ranks: Ranks) -> None:
    (one, first), (_, second) = opened(ranks), opened(ranks)

    def give() -> None:
        one.library.begin_group()
        try:
            for each in (first, second):
                one.library.receive(each._own, ROOM.data_ptr(), 4, 1, one.queue.handle)
        finally:
            one.library.end_group()

    with pytest.raises(RuntimeError, match="invalid usage"):
        one.do(give)
    assert ranks.double.offences() == ["two communicators in one group of calls"]


def test_two_communicators_at_work_are_caught(ranks: Ranks) -> None:
    ranks.joined(2)
    ranks.joined(2)
    assert ranks.double.offences() == ["work for a communicator while another one is at work"]


def test_a_receive_of_another_length_is_caught(ranks: Ranks) -> None:
    (one, two), (to_two, to_one) = ranks.of(2), ranks.joined(2)
    one.do(to_two.send, (numbers(2),), 1)
    one.do(to_two.send, (numbers(1),), 1)
    two.do(to_one.receive, (numbers(1),), 0)
    until(ranks.double.offences)
    assert ranks.double.offences() == ["a receive of 4 bytes met a send of 8"]
    two.do(to_one.abort)


def test_an_abort_under_the_kernel_of_a_peer_is_caught_when_the_peer_lives_on(ranks: Ranks) -> None:
    (one, two), (to_two, to_one) = ranks.of(2), ranks.joined(2)
    two.do(to_one.receive, (numbers(4),), 0)
    until(lambda: not to_one.pending().has_come())
    time.sleep(0.01)
    one.do(to_two.abort)
    two.do(to_one.abort)
    assert ranks.double.offences() == []
    ranks.joined(2)
    assert ranks.double.offences() == ["an abort of another rank freed memory under a kernel of rank 1"]


def test_an_abort_behind_the_revokes_of_all_is_right(ranks: Ranks) -> None:
    (one, two), (to_two, to_one) = ranks.of(2), ranks.joined(2)
    room = numbers(4)
    two.do(to_one.receive, (room,), 0)
    for rank, each in ((one, to_two), (two, to_one)):
        assert raw(rank, "ncclCommRevoke", each._own, 0) == IN_PROGRESS
    until(lambda: two.do(two.library.progress, to_one._own))
    assert room.numpy().tobytes() == bytes([GARBAGE] * 16)
    one.do(to_two.abort)
    two.do(to_one.abort)
    ranks.joined(2)
    assert ranks.double.offences() == []


def raw(rank: Rank, name: str, *given: Any) -> int:
    """Calls the library itself, in the thread of a rank; returns its result."""
    return int(rank.do(getattr(rank.library._c, name), *given))


Planted = Callable[[Rank, ctypes.c_void_p], Any]


def given(rank: Rank, own: ctypes.c_void_p, length: int = 4, peer: int = 1) -> None:
    rank.library.begin_group()
    try:
        rank.library.send(own, ROOM.data_ptr(), length, peer, rank.queue.handle)
    finally:
        rank.library.end_group()


def given_twice(rank: Rank, own: ctypes.c_void_p) -> None:
    given(rank, own)
    given(rank, own)


def given_behind_an_abort(rank: Rank, own: ctypes.c_void_p) -> None:
    rank.library.abort(own)
    given(rank, own)


def revoked(rank: Rank, own: ctypes.c_void_p) -> None:
    rank.library._checked(rank.library._c.ncclCommRevoke(own, 0))


def given_behind_a_revoke(rank: Rank, own: ctypes.c_void_p) -> None:
    revoked(rank, own)
    given(rank, own)


def revoked_twice(rank: Rank, own: ctypes.c_void_p) -> None:
    revoked(rank, own)
    revoked(rank, own)


def aborted_twice(rank: Rank, own: ctypes.c_void_p) -> None:
    rank.library.abort(own)
    rank.library.abort(own)


def revoked_while_joining(rank: Rank, own: ctypes.c_void_p) -> None:
    revoked(rank, rank.library.begin_join(rank.library.new_id(), 0, 2))


def joined_inside_a_group(rank: Rank, own: ctypes.c_void_p) -> None:
    rank.library.begin_group()
    rank.library.begin_join(rank.library.new_id(), 0, 2)


def sent_without_a_group(rank: Rank, own: ctypes.c_void_p) -> None:
    rank.library.send(own, ROOM.data_ptr(), 4, 1, rank.queue.handle)


PLANTED: dict[Planted, str] = {
    given_twice: "a send before the last call has settled",
    given_behind_an_abort: "a send for a communicator that is none, or was aborted",
    given_behind_a_revoke: "a send for a communicator that was revoked",
    revoked_twice: "a second revoke",
    aborted_twice: "an abort of a communicator that is none, or was aborted",
    revoked_while_joining: "a revoke of a communicator whose ranks are joining",
    joined_inside_a_group: "a group is joined inside of a group of calls",
    sent_without_a_group: "a send outside of a group of calls",
    lambda rank, own: given(rank, own, length=0): "a send of 0 bytes of type 1, peer 1",
    lambda rank, own: given(rank, own, peer=0): "a send of 4 bytes of type 1, peer 0",
    lambda rank, own: rank.library.end_group(): "the end of a group of calls that was not begun",
}


def test_calls_against_the_rules_fail_and_are_counted(ranks: Ranks) -> None:
    for planted, words in PLANTED.items():
        one, opening = opened(ranks)
        with pytest.raises(RuntimeError, match="invalid"):
            one.do(planted, one, opening._own)
        assert ranks.double.offences()[-1] == words
        ranks.start_anew()
