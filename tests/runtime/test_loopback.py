"""The transport inside one process: messages find their receives by key, epoch and specs, and an end is seen."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.core.errors import InvariantError, TransferFailedError
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.loopback import Groups, LoopbackBackend, LoopbackTransport
from engine.runtime.transport.tensor_spec import TensorSpec
from engine.runtime.transport.transport import Traffic
from tests.runtime.peers import an_aside, an_order

KEY, OTHER, ASIDE = an_order(1), an_order(2), an_aside(3)
TWO = (TensorSpec((2,), torch.float32, False),)


class Looks:
    """A waiter that must not wait: what it looks for is there."""

    num_woken = 0

    def wait_until(self, look: Callable[[], Any]) -> Any:
        found = look()
        assert found is not None, "this would wait for ever"
        return found

    def wake(self) -> None:
        self.num_woken += 1


def pair(epoch: int = 0) -> tuple[LoopbackTransport, LoopbackTransport]:
    groups, ends = Groups(), dict[int, LoopbackTransport]()
    backends = [LoopbackBackend(groups, LinkCuts(Looks()), worker, contextlib.nullcontext) for worker in (4, 7)]

    def join(number: int) -> None:
        ends[number] = backends[number].joining(epoch, (4, 7)).join()

    threads = [threading.Thread(target=join, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends[0], ends[1]


def numbers(*values: float) -> tuple[torch.Tensor]:
    return (torch.tensor(values, dtype=torch.float32),)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_message_finds_its_receive(is_early: bool) -> None:
    one, other = pair()
    posts = [lambda: other.in_order.post(4, KEY, TWO), lambda: other.in_order.post(4, OTHER, TWO)]
    if not is_early:
        for post in posts:
            post()
    one.in_order.send(7, OTHER, numbers(3, 4))
    one.in_order.send(7, KEY, numbers(1, 2))
    assert other.in_order.has_arrived(4, KEY) is not is_early
    if is_early:
        for post in posts:
            post()
    assert other.in_order.take(4, KEY)[0].tolist() == [1, 2]
    assert other.in_order.take(4, OTHER)[0].tolist() == [3, 4]
    assert one.traffic() == {4: Traffic(), 7: Traffic(sent=2)}
    assert other.traffic() == {4: Traffic(posted=2, received=2), 7: Traffic()}
    assert one.bytes_sent == 16


def test_messages_of_one_key_arrive_in_their_order_and_are_copies() -> None:
    one, other = pair()
    sent = numbers(1, 2)
    one.aside.send(7, ASIDE, sent)
    sent[0].zero_()
    one.aside.send(7, ASIDE, sent)
    assert other.aside.take_arrived(4, ASIDE) is None
    for expected in ([1, 2], [0, 0]):
        other.aside.post(4, ASIDE, TWO)
        assert other.aside.take(4, ASIDE)[0].tolist() == expected


def test_a_message_of_another_shape_or_epoch_is_a_bug() -> None:
    one, other = pair(epoch=3)
    other.in_order.post(4, KEY, TWO)
    with pytest.raises(InvariantError, match=r"\[3\] torch.float32 instead of \[2\]"):
        one.in_order.send(7, KEY, numbers(1, 2, 3))
    one.epoch = 4
    other.in_order.post(4, OTHER, TWO)
    with pytest.raises(InvariantError, match="is of epoch 4, wanted in 3"):
        one.in_order.send(7, OTHER, numbers(1, 2))


def test_the_end_of_a_worker_ends_what_others_want_of_it_but_not_what_it_has_sent() -> None:
    one, other = pair()
    one.in_order.send(7, KEY, numbers(1, 2))
    one.abandon()
    other.in_order.post(4, KEY, TWO)
    assert other.in_order.take(4, KEY)[0].tolist() == [1, 2]
    for transfer in (lambda: other.in_order.post(4, KEY, TWO), lambda: other.in_order.send(4, KEY, numbers(1))):
        with pytest.raises(TransferFailedError) as failed:
            transfer()
        assert failed.value.peer == 4


def test_a_wait_for_a_worker_ends_with_it() -> None:
    one, other = pair()
    other.in_order.post(4, KEY, TWO)
    one.close()
    with pytest.raises(TransferFailedError, match="transfer from worker 4 failed"):
        other.in_order.take(4, KEY)


def test_an_abandoned_attempt_to_join_fails() -> None:
    backend = LoopbackBackend(Groups(), LinkCuts(Looks()), 0, contextlib.nullcontext)
    joining = backend.joining(0, (0, 1))
    threading.Timer(0.01, joining.abandon).start()
    with pytest.raises(TransferFailedError, match="joining the others"):
        joining.join()
