"""Cut connections: what is held up, which side sees it, and that nothing is lost or overtakes once they are healed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import HashStore

from engine.core.errors import TransferFailedError
from engine.runtime.device.device import HOST
from engine.runtime.faults.links import cut_link
from engine.runtime.faults.registry import WorkerFaultContext
from engine.runtime.transport.gloo_transport import GlooJoining
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.tensor_spec import TensorSpec
from engine.runtime.transport.transport import Joining, Transport
from tests.runtime.peers import an_aside, an_order

Found = TypeVar("Found")
BORDER = (TensorSpec((1,), torch.float32, False),)


class Patience:
    """A waiter that gives up after some seconds."""

    def __init__(self) -> None:
        self._news = threading.Semaphore(0)

    def wait_until(self, look: Callable[[], Found | None]) -> Found:
        """Waits until `look` finds something."""
        while (found := look()) is None:
            if not self._news.acquire(timeout=10):
                raise TimeoutError
        return found

    def wake(self) -> None:
        """Has the waiting thread look again."""
        self._news.release()


class Meeting(torch.distributed.PrefixStore):
    """A rendezvous in this process."""

    def give_up(self) -> None:
        """Ends no wait: none is under way where the tests give up."""


class Pair:
    """Two workers of one process that form groups over gloo."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.cuts = (LinkCuts(Patience()), LinkCuts(Patience()))
        self.pool = ThreadPoolExecutor(4)

    def joining(self, epoch: int, worker: int) -> Joining:
        """Returns the attempt of a worker to join the group of an epoch."""
        store = Meeting(f"{epoch}", self.store)
        return GlooJoining(self.cuts[worker], store, worker, (0, 1), epoch)  # type: ignore[arg-type]

    def joined(self, epoch: int = 0) -> tuple[Transport, Transport]:
        """Returns both ends of a group."""
        one, other = [self.pool.submit(self.joining(epoch, worker).join) for worker in (0, 1)]
        return one.result(10), other.result(10)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.pool.shutdown()


def send(transport: Transport, target: int, *numbers: int) -> None:
    for number in numbers:
        transport.in_order.send(target, an_order(number), (torch.full((1,), float(number)),))


def post(transport: Transport, source: int, *numbers: int) -> None:
    for number in numbers:
        transport.in_order.post(source, an_order(number), BORDER)


def take(transport: Transport, source: int, *numbers: int) -> list[float]:
    return [transport.in_order.take(source, an_order(number))[0].item() for number in numbers]


def comes(transport: Transport, source: int, number: int, within_s: float = 5.0) -> bool:
    """Returns whether a posted message arrives in time."""
    until_s = time.monotonic() + within_s
    while not transport.in_order.has_arrived(source, an_order(number)) and time.monotonic() < until_s:
        time.sleep(0.005)
    return transport.in_order.has_arrived(source, an_order(number))


def test_there_the_sender_notices_nothing_and_the_rest_goes_through(pair: Pair) -> None:
    one, other = pair.joined()
    post(other, 0, 1, 2, 3)
    post(one, 1, 4)
    send(one, 1, 1)
    assert take(other, 0, 1) == [1.0]
    assert pair.cuts[0].cut(1, "there")
    send(one, 1, 2, 3)
    one.aside.send(1, an_aside(7), (torch.ones(1),))
    send(other, 0, 4)
    assert take(one, 1, 4) == [4.0]
    assert not comes(other, 0, 2, within_s=0.1)
    assert one.traffic()[1].sent == 4, "the sender believes that it has sent them"
    assert other.traffic()[0].received == 1
    pair.cuts[0].heal(1)
    other.aside.post(0, an_aside(7), BORDER)
    assert take(other, 0, 2, 3) == [2.0, 3.0]
    assert other.aside.take(0, an_aside(7))[0].item() == 1.0
    assert one.traffic()[1].sent == 4
    for each in (one, other):
        each.release_sent()
        each.close()


def test_back_the_receiver_finds_nothing_until_the_time_is_over(pair: Pair) -> None:
    one, other = pair.joined()
    post(one, 1, 1, 2)
    send(other, 0, 1)
    assert comes(one, 1, 1)
    assert pair.cuts[0].cut(1, "back", for_ns=150_000_000)
    began_s = time.monotonic()
    send(other, 0, 2)
    assert one.in_order.take_arrived(1, an_order(1)) is None
    assert one.traffic()[1].received == 1, "as it was when the connection went silent"
    assert take(one, 1, 1, 2) == [1.0, 2.0]
    assert time.monotonic() - began_s > 0.14
    send(one, 1, 3)
    post(other, 0, 3)
    assert take(other, 0, 3) == [3.0]
    for each in (one, other):
        each.close()


def test_no_group_forms_over_a_cut_connection_until_it_is_healed(pair: Pair) -> None:
    one, other = pair.joined()
    assert pair.cuts[0].cut(1, "both")
    send(one, 1, 1)
    one.abandon()
    other.abandon()
    late = pair.pool.submit(pair.joined, 1)
    given_up = pair.joining(2, 0)
    threading.Timer(0.05, given_up.abandon).start()
    with pytest.raises(TransferFailedError, match="given up"):
        given_up.join()
    assert not late.done()
    pair.cuts[0].heal(1)
    one, other = late.result(10)
    assert one.traffic()[1].sent == 0, "a message of the old group is gone"
    for each in (one, other):
        each.close()


def test_the_fault_is_confirmed_if_the_peer_is_a_member(pair: Pair) -> None:
    one, other = pair.joined()
    told: list[str] = []
    control: Any = None
    for peer in (1, 5):
        parameters = {"peer": peer, "direction": "there"}
        context = WorkerFaultContext(
            "cut", parameters, None, control, told.append, lambda *slow: None, pair.cuts[0].cut, HOST
        )
        cut_link(context)
    assert told == ["the connection to worker 1 is cut (there)"]
    assert not pair.cuts[1].cut(7, "both")
    for each in (one, other):
        each.close()
    assert not pair.cuts[0].cut(1, "both"), "there is no group"
