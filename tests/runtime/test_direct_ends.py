"""The ends of groups over links, in one process: messages find their receives, errors name the peer, a fence drops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.core.errors import TransferFailedError
from engine.runtime.transport.transport import TensorSpec, Traffic
from tests.runtime.linked import Linked
from tests.runtime.peers import an_aside, an_order

KEY, OTHER, ASIDE = an_order(1), an_order(2), an_aside(3)
TWO = (TensorSpec((2,), torch.float32, False),)
LARGE = 1 << 20  # numbers of a message that goes through the ring


@pytest.fixture(name="linked")
def _linked() -> Iterator[Linked]:
    made = Linked(4, 7)
    yield made
    made.close()


def numbers(*values: float) -> tuple[torch.Tensor]:
    return (torch.tensor(values, dtype=torch.float32),)


def settle(linked: Linked) -> None:
    """Lets everything that is under way arrive."""
    while linked.desks.look():
        pass


@pytest.mark.parametrize("is_early", [False, True])
def test_a_message_finds_its_receive(linked: Linked, is_early: bool) -> None:
    one, other = linked.enter(0)
    posts = [lambda: other.in_order.post(4, KEY, TWO), lambda: other.in_order.post(4, OTHER, TWO)]
    if not is_early:
        for post in posts:
            post()
    one.in_order.send(7, OTHER, numbers(3, 4))
    one.in_order.send(7, KEY, numbers(1, 2))
    settle(linked)
    assert other.in_order.has_arrived(4, KEY) is not is_early
    if is_early:
        for post in posts:
            post()
    assert other.in_order.take(4, KEY)[0].tolist() == [1, 2]
    assert other.in_order.take(4, OTHER)[0].tolist() == [3, 4]
    assert one.traffic() == {4: Traffic(), 7: Traffic(sent=2)}
    assert other.traffic() == {4: Traffic(posted=2, received=2), 7: Traffic()}
    assert one.bytes_sent == 16


def test_messages_of_one_key_arrive_in_their_order_and_share_no_memory_with_those_sent(linked: Linked) -> None:
    one, other = linked.enter(0)
    settle(linked)
    sent = numbers(1, 2)
    one.aside.send(7, ASIDE, sent)
    settle(linked)
    sent[0].zero_()
    one.aside.send(7, ASIDE, sent)
    assert other.aside.take_arrived(4, ASIDE) is None
    for expected in ([1, 2], [0, 0]):
        other.aside.post(4, ASIDE, TWO)
        assert other.aside.take(4, ASIDE)[0].tolist() == expected


def test_a_key_aside_is_none_in_program_order(linked: Linked) -> None:
    one, other = linked.enter(0)
    one.aside.send(7, an_aside(1), numbers(1, 2))
    one.in_order.send(7, an_order(1), numbers(3, 4))
    other.in_order.post(4, an_order(1), TWO)
    assert other.in_order.take(4, an_order(1))[0].tolist() == [3, 4]
    other.aside.post(4, an_aside(1), TWO)
    assert other.aside.take(4, an_aside(1))[0].tolist() == [1, 2]


def test_tensors_of_a_message_are_changed_one_by_one(linked: Linked) -> None:
    """They lie in one memory: a change of one in place must be none of the others, for autograd too."""
    one, other = linked.enter(0)
    one.in_order.send(7, KEY, (*numbers(1, 2), *numbers(3, 4)))
    other.in_order.post(4, KEY, TWO * 2)
    first, second = other.in_order.take(4, KEY)
    version = second._version
    first.add_(1)
    assert (second.tolist(), second._version) == ([3, 4], version)
    assert second.data_ptr() % 64 == first.data_ptr() % 64


@pytest.mark.parametrize("count", [1, 3])
def test_a_message_of_another_size_fails_and_names_key_and_worker(linked: Linked, count: int) -> None:
    one, other = linked.enter(3)
    other.in_order.post(4, KEY, TWO)
    one.in_order.send(7, KEY, numbers(*range(count)))
    with pytest.raises(TransferFailedError, match=r"number=1\) from worker 4 has .* bytes, which are not") as failed:
        other.in_order.take(4, KEY)
    assert failed.value.peer == 4


@pytest.mark.parametrize("count", [2, LARGE])
def test_a_fence_drops_what_has_not_been_sent_and_what_has_not_been_taken(linked: Linked, count: int) -> None:
    border = (TensorSpec((count,), torch.float32, False),)
    one, other = linked.enter(0)
    for key in range(3):
        one.in_order.send(7, an_order(key), (torch.full((count,), 1.0),))
    other.in_order.post(4, an_order(0), border)
    other.in_order.take(4, an_order(0))
    for key in range(30):  # far more than there is room for
        one.in_order.send(7, an_order(key), (torch.full((count,), 1.0),))
    one, other = linked.enter(1)
    assert one.traffic()[7] == Traffic()
    one.in_order.send(7, an_order(0), (torch.full((count,), 2.0),))
    other.in_order.post(4, an_order(0), border)
    assert other.in_order.take(4, an_order(0))[0].unique().tolist() == [2]
    settle(linked)
    other.in_order.post(4, an_order(1), border)
    assert other.in_order.take_arrived(4, an_order(1)) is None, "a message of the group before"


@pytest.mark.parametrize("count", [2, LARGE])
def test_a_message_of_the_next_epoch_waits_for_its_receiver(linked: Linked, count: int) -> None:
    """Its sender has heard of the epoch first; the receiver still waits in the one before."""
    border = (TensorSpec((count,), torch.float32, False),)
    one, other = linked.enter(0)
    other.in_order.post(4, KEY, border)
    one.in_order.send(7, OTHER, (torch.full((count,), 1.0),))
    one.abandon()
    one = linked.enter_one(4, 1)
    one.in_order.send(7, KEY, (torch.full((count,), 2.0),))
    settle(linked)
    assert other.in_order.take_arrived(4, KEY) is None
    other.abandon()
    other = linked.enter_one(7, 1)
    other.in_order.post(4, KEY, border)
    assert other.in_order.take(4, KEY)[0].unique().tolist() == [2]


def test_a_worker_that_leaves_a_group_ends_no_wait_of_the_others(linked: Linked) -> None:
    """The agent does, by a new epoch: a link outlives its groups."""
    one, other = linked.enter(0)
    other.in_order.post(4, KEY, TWO)
    one.in_order.send(7, OTHER, numbers(1, 2))
    settle(linked)
    one.abandon()
    settle(linked)
    assert other.failed is None and other.in_order.take_arrived(4, KEY) is None
    other.in_order.post(4, OTHER, TWO)
    assert other.in_order.take(4, OTHER)[0].tolist() == [1, 2], "what it had sent"
