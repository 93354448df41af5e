"""Cut connections: what is held up, which side sees it, and that nothing is lost or overtakes once they are healed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine.core.errors import TransferFailedError
from engine.runtime.device.device import HOST
from engine.runtime.faults.kinds import cut_link
from engine.runtime.faults.registry import WorkerFaultContext
from engine.runtime.transport.direct_transport import DirectBackend
from engine.runtime.transport.transport import TensorSpec, Transport
from tests.runtime.linked import Linked
from tests.runtime.peers import an_aside, an_order

BORDER = (TensorSpec((1,), torch.float32, False),)


@pytest.fixture
def pair() -> Iterator[Linked]:
    made = Linked(0, 1)
    yield made
    made.close()


def send(transport: Transport, target: int, *numbers: int) -> None:
    for number in numbers:
        transport.in_order.send(target, an_order(number), (torch.full((1,), float(number)),))


def post(transport: Transport, source: int, *numbers: int) -> None:
    for number in numbers:
        transport.in_order.post(source, an_order(number), BORDER)


def take(transport: Transport, source: int, *numbers: int) -> list[float]:
    return [transport.in_order.take(source, an_order(number))[0].item() for number in numbers]


def comes(pair: Linked, transport: Transport, source: int, number: int, within_s: float = 5.0) -> bool:
    """Returns whether a posted message arrives in time, while all workers wait."""
    until_s = time.monotonic() + within_s
    while not transport.in_order.has_arrived(source, an_order(number)) and time.monotonic() < until_s:
        pair.desks.look()
        time.sleep(0.005)
    return transport.in_order.has_arrived(source, an_order(number))


def test_there_the_sender_notices_nothing_and_the_rest_goes_through(pair: Linked) -> None:
    one, other = pair.enter(0)
    post(other, 0, 1, 2, 3)
    post(one, 1, 4)
    send(one, 1, 1)
    assert take(other, 0, 1) == [1.0]
    assert pair.cuts[0].cut(1, "there")
    send(one, 1, 2, 3)
    one.aside.send(1, an_aside(7), (torch.ones(1),))
    send(other, 0, 4)
    assert take(one, 1, 4) == [4.0]
    assert not comes(pair, other, 0, 2, within_s=0.1)
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


def test_a_link_that_has_ended_behind_a_cut_fails_the_group_once_that_is_healed(pair: Linked) -> None:
    """The error was raised in the thread that heals, and the main thread waited on."""
    one, other = pair.enter(0)
    post(other, 0, 1)
    send(one, 1, 1)
    assert take(other, 0, 1) == [1.0]
    assert pair.cuts[0].cut(1, "there")
    send(one, 1, 2)
    pair.links[1].close()
    pair.desks.look()
    healing = threading.Thread(target=pair.cuts[0].heal, args=(1,))
    healing.start()
    healing.join()
    with pytest.raises(TransferFailedError, match="to worker 1 failed"):
        one.in_order.take(0, an_order(9))


def test_back_the_receiver_finds_nothing_until_the_time_is_over(pair: Linked) -> None:
    one, other = pair.enter(0)
    post(one, 1, 1, 2)
    send(other, 0, 1)
    assert comes(pair, one, 1, 1)
    began_s = time.monotonic()
    assert pair.cuts[0].cut(1, "back", for_ns=150_000_000)
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


def test_no_group_forms_over_a_cut_connection_until_it_is_healed(pair: Linked) -> None:
    one, other = pair.enter(0)
    assert pair.cuts[0].cut(1, "both")
    send(one, 1, 1)
    one.abandon()
    other.abandon()
    late = ThreadPoolExecutor(1).submit(pair.enter, 1)
    given_up = DirectBackend(pair.cuts[0], pair.links[0]).joining(2, (0, 1))
    assert given_up.may_wait
    assert not DirectBackend(pair.cuts[0], pair.links[0]).joining(2, (0,)).may_wait
    threading.Timer(0.05, given_up.abandon).start()
    with pytest.raises(TransferFailedError, match="given up"):
        given_up.join()
    assert not late.done()
    pair.cuts[0].heal(1)
    one, other = late.result(10)
    assert one.traffic()[1].sent == 0, "a message of the old group is gone"
    for each in (one, other):
        each.close()


@pytest.mark.parametrize("direction", ["there", "back"])
def test_the_fault_is_confirmed_by_the_first_message_that_it_holds_up(pair: Linked, direction: str) -> None:
    one, other = pair.enter(0)
    told: list[str] = []
    control: Any = None
    faults = DirectBackend(pair.cuts[0], pair.links[0]).link_faults
    for peer in (1, 5):
        parameters = {"peer": peer, "direction": direction}
        cut_link(WorkerFaultContext("cut", parameters, None, control, told.append, lambda *slow: None, faults, HOST))
    post(one, 1, 1)
    sender, target, way = (one, 1, "there") if direction == "there" else (other, 0, "back")
    send(other, 0, 1) if direction == "there" else send(one, 1, 1)
    assert told == [], "the other way is not cut"
    send(sender, target, 2, 1)
    assert comes(pair, one, 1, 1, within_s=5.0 if way == "there" else 0.1) is (way == "there")
    assert told == [f"the connection to worker 1 is cut ({direction}): it held up a message {way}"]
    assert not pair.cuts[1].cut(7, "both")
    for each in (one, other):
        each.close()
    assert not pair.cuts[0].cut(1, "both"), "there is no group"
