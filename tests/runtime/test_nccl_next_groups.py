"""A communicator that is formed aside while another one is at work: entered, given up, late, forgotten."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engine.core.errors import InvariantError
from engine.core.messages import NextGroupMessage
from engine.runtime.transport import group_formation, nccl_queue, nccl_transport
from engine.runtime.transport.group_formation import NextGroups
from engine.runtime.transport.nccl_transport import NcclTransport
from engine.runtime.transport.transport import Issued
from tests.doubles.fake_nccl import FakeNccl
from tests.runtime.test_nccl_transport import A0, A1, TWO, Backends, backends, nccl, numbers, pair, program

__all__ = ["backends", "nccl", "pair"]

Pair = tuple[NcclTransport, NcclTransport]


class Next:
    """The groups of coming epochs of workers 4 and 7; `told` are the ends of their attempts."""

    def __init__(self, backends: Backends):
        self.told: queue.SimpleQueue[tuple[int, tuple[int, int], str]] = queue.SimpleQueue()
        self.of = {worker: NextGroups(each, self._teller(worker)) for worker, each in backends.items()}

    def _teller(self, worker: int) -> Callable[[tuple[int, int], str], None]:
        return lambda key, failure: self.told.put((worker, key, failure))

    def form(self, number: int) -> None:
        for each in self.of.values():
            each.form(NextGroupMessage(1, number, (4, 7)))

    def formed(self) -> list[str]:
        """Waits for the end of an attempt at both workers; returns the failures."""
        return [self.told.get(timeout=20)[2] for _ in self.of]

    def leave(self, number: int) -> None:
        for each in self.of.values():
            each.leave([(1, number)])

    def enter(self, number: int, before: Pair) -> Pair:
        for each in before:
            each.abandon()
        return self.of[4].enter((1, number)), self.of[7].enter((1, number))  # type: ignore[return-value]


@pytest.fixture
def coming(backends: Backends) -> Iterator[Next]:
    found = Next(backends)
    yield found
    for number in (1, 2):
        found.leave(number)


def exchange(one: NcclTransport, other: NcclTransport, *, taken: bool = True) -> None:
    program(one, other, [A0, A1], [A0, A1])
    one.in_order.send(7, A0, numbers(1, 2))
    one.in_order.send(7, A1, numbers(3, 4))
    if taken:
        assert other.in_order.take(4, A0)[0].tolist() == [1, 2]
        assert other.in_order.take(4, A1)[0].tolist() == [3, 4]


def test_a_group_forms_while_the_present_one_works_and_is_entered(pair: Pair, coming: Next, nccl: FakeNccl) -> None:
    coming.form(1)
    exchange(*pair)
    assert coming.formed() == ["", ""]
    exchange(*pair)
    assert (nccl.num_aside, nccl.num_aborted) == (2, 0)
    exchange(*coming.enter(1, pair))
    assert nccl.num_aborted == 2, "those of the group before"


def test_a_group_that_is_left_is_revoked_and_aborted_when_each_member_has_revoked_its_own(
    pair: Pair, coming: Next, nccl: FakeNccl
) -> None:
    """An abort gives memory free, into which the GPU of a member that has not heard may still write."""
    nccl.nobody_dies = True
    coming.form(1)
    assert coming.formed() == ["", ""]
    for num, each in enumerate(pair, 1):
        each.abandon()
        until_s = time.monotonic() + 10
        while nccl.num_revoked < num and time.monotonic() < until_s:
            time.sleep(0.001)
        time.sleep(0.02)
        assert (nccl.num_revoked, nccl.num_aborted) == (num, 0)
    exchange(*coming.enter(1, pair))
    assert nccl.num_aborted == 2


def test_planted_abort_at_once_is_found(
    pair: Pair, coming: Next, nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl.nobody_dies = True
    with monkeypatch.context() as patch:
        patch.setattr(nccl_queue.IssueQueue, "revoke", lambda left: setattr(left, "_revoked", left._communicator))
        pair[0].abandon()
        until_s = time.monotonic() + 10
        while not nccl.num_aborted and time.monotonic() < until_s:
            time.sleep(0.001)
    assert nccl.wrongs == ["worker 4 aborts under the work of [4, 7]"]
    nccl.wrongs.clear()


def test_a_rank_that_does_not_come_stops_no_message_of_the_present_group(
    pair: Pair, coming: Next, nccl: FakeNccl
) -> None:
    nccl.absent = {7}
    coming.form(1)
    until_s = time.monotonic() + 10
    while nccl.num_aside < 2 and time.monotonic() < until_s:
        time.sleep(0.001)
    exchange(*pair)
    assert coming.told.empty(), "it is still being formed"
    coming.leave(1)
    assert all("was left" in each for each in coming.formed())
    nccl.absent = set()
    coming.form(2)
    assert coming.formed() == ["", ""]
    exchange(*coming.enter(2, pair))


def test_groups_are_not_connected_before_they_are_entered(pair: Pair, coming: Next, nccl: FakeNccl) -> None:
    coming.form(1)
    assert coming.formed() == ["", ""]
    assert not any(group.connecting for group in list(nccl.groups.values())[1:])


def test_planted_entry_beside_the_present_group_is_found(pair: Pair, coming: Next, nccl: FakeNccl) -> None:
    coming.form(1)
    assert coming.formed() == ["", ""]
    exchange(coming.of[4].enter((1, 1)), coming.of[7].enter((1, 1)))  # type: ignore[arg-type]
    assert sorted(nccl.wrongs) == [f"worker {each} has two communicators at work" for each in (4, 7)]
    nccl.wrongs.clear()


def test_planted_message_of_the_group_before_is_found_by_its_key(pair: Pair, coming: Next) -> None:
    coming.form(1)
    assert coming.formed() == ["", ""]
    one, other = coming.enter(1, pair)
    other.expect(3, [Issued(False, 4, A0, TWO)])
    pair[0]._between._issues = one._issues  # it issues on the communicator of the next group
    pair[0].expect(3, [Issued(True, 7, A0, TWO)])
    pair[0].in_order.send(7, A0, numbers(1, 2))
    with pytest.raises(InvariantError, match=r"asked for 0SEND_F0 .*epoch 1: 0SEND_F0 .*epoch 0 came"):
        other.in_order.take(4, A0)


def test_planted_group_that_is_never_given_up_is_found(
    pair: Pair, coming: Next, nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming.form(1)
    assert coming.formed() == ["", ""]
    with monkeypatch.context() as patch:
        patch.setattr(group_formation._Attempt, "give_up", lambda attempt: None)
        coming.leave(1)
    coming.form(2)
    assert coming.formed() == ["", ""]
    assert sorted(nccl.wrongs) == [f"worker {each} has not aborted 1 communicators of no use" for each in (4, 7)]
    nccl.wrongs.clear()


def test_an_abort_aside_that_does_not_return_ends_the_worker(pair: Pair, coming: Next, nccl: FakeNccl) -> None:
    coming.form(1)
    assert coming.formed() == ["", ""]
    nccl.stands[4] = ("abort", 1)
    attempt = coming.of[4]._attempts[1, 1].plane
    assert isinstance(attempt, NcclTransport)
    attempt._last_resort = attempt._last_resort._replace(abort_s=0.05)
    coming.leave(1)
    until_s = time.monotonic() + 10
    while not nccl.ended and time.monotonic() < until_s:
        time.sleep(0.005)
    assert nccl.ended == [nccl_transport.ENDS_ITSELF]
    assert threading.active_count() > 1
