"""Links that end, are made anew or bring what no worker sends: nothing of one worker is ever taken for another's."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from engine.core.errors import TransferFailedError
from engine.core.links import ASIDE, IN_ORDER, INLINE, MOST_BYTES, RING_BYTES, STATE, Frame, Mailbox, key_of
from engine.runtime.transport.direct_transport import DirectTransport
from engine.runtime.transport.link_wire import _TCP_INFO, Wire
from engine.runtime.transport.links import Links
from engine.runtime.transport.peer_link import Ends, PeerLink, host_room
from engine.runtime.transport.transport import TensorSpec
from tests.looped import looped
from tests.runtime.linked import Desk, Linked
from tests.runtime.peers import an_order

KEY, OTHER = an_order(1), an_order(2)
ONE = (TensorSpec((1,), torch.float32, False),)
LARGE = (TensorSpec((1 << 20,), torch.float32, False),)


@pytest.fixture(name="linked")
def _linked() -> Iterator[Linked]:
    made = Linked(0, 1)
    yield made
    made.close()


def number(value: float) -> tuple[torch.Tensor]:
    return (torch.tensor([float(value)]),)


def settle(linked: Linked) -> None:
    while linked.desks.look():
        pass


def passes(one: DirectTransport, other: DirectTransport, value: float) -> bool:
    """Returns whether a message goes from worker 0 to worker 1, and one back."""
    one.in_order.send(1, KEY, number(value))
    other.in_order.post(0, KEY, ONE)
    other.in_order.send(0, KEY, number(-value))
    one.in_order.post(1, KEY, ONE)
    there, back = other.in_order.take(0, KEY)[0].item(), one.in_order.take(1, KEY)[0].item()
    return (there, back) == (value, -value)


def socket_of(linked: Linked, worker: int, peer: int) -> socket.socket:
    """Returns the end of a link, to break it or to send over it what a worker would not."""
    ends = linked.links[worker]._links[peer].ends
    assert ends is not None
    return ends.wire._end


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_link_that_breaks_is_made_anew_in_the_next_epoch(linked: Linked, is_awaited: bool) -> None:
    one, other = linked.enter(0)
    assert passes(one, other, 1)
    if is_awaited:
        other.in_order.post(0, OTHER, ONE)
    socket_of(linked, 0, 1).shutdown(socket.SHUT_RDWR)
    settle(linked)
    assert (other.failed is not None) is is_awaited
    with pytest.raises(TransferFailedError) as failed:
        one.in_order.send(1, OTHER, number(2))
    assert failed.value.peer == 1
    numbers = [links._newest[1 - worker][0] for worker, links in linked.links.items()]
    one, other = linked.enter(1)
    assert passes(one, other, 3)
    again = [links._newest[1 - worker][0] for worker, links in linked.links.items()]
    assert len(set(numbers)) == len(set(again)) == 1 and again[0] > numbers[0]


def test_an_end_that_was_not_seen_before_the_next_epoch_costs_no_second_one(linked: Linked) -> None:
    """One end is closed; the other worker has not looked since, and sends at once when it enters."""
    one, other = linked.enter(0)
    assert passes(one, other, 1)
    linked.links[0]._fail(linked.links[0]._links[1], TransferFailedError("planted", 1))
    one, other = linked.enter(1)
    other.in_order.send(0, KEY, number(5))
    one.in_order.send(1, KEY, number(6))
    one.in_order.post(1, KEY, ONE)
    other.in_order.post(0, KEY, ONE)
    assert one.in_order.take(1, KEY)[0].item() == 5
    assert other.in_order.take(0, KEY)[0].item() == 6


def test_a_link_that_two_threads_need_at_once_keeps_their_messages(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU the thread of the copies sends, while the main thread takes in the link that the peer wanted."""
    one, other = linked.enter(0)
    links = linked.links[0]
    links.enter(one.number, one)
    is_making, is_adopted, new = threading.Event(), threading.Event(), links._new

    def slow(peer: int) -> PeerLink:
        link = new(peer)
        if threading.current_thread() is sender:
            is_making.set()
            is_adopted.wait(0.2)
        return link

    monkeypatch.setattr(links, "_new", slow)
    sender = threading.Thread(target=one.in_order._begin, args=(1, KEY, number(4)))
    sender.start()
    assert is_making.wait(10)
    other.in_order.send(0, OTHER, number(5))
    links._adopt_given()
    is_adopted.set()
    sender.join(10)
    other.in_order.post(0, KEY, ONE)
    one.in_order.post(1, OTHER, ONE)
    assert (other.in_order.take(0, KEY)[0].item(), one.in_order.take(1, OTHER)[0].item()) == (4, 5)


def test_a_thread_beside_the_main_one_watches_nothing(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of messages that fill the socket of a link leaves from the wait of the main thread."""
    one, other = linked.enter(0)
    assert passes(one, other, 1)
    links, watched, watch = linked.links[0], list[int](), linked.links[0]._watch

    def noted(link: PeerLink) -> None:
        watched.append(threading.get_ident())
        watch(link)

    monkeypatch.setattr(links, "_watch", noted)
    sent = [torch.full((15_000,), float(each)) for each in range(64)]  # each goes over the socket in one frame

    def send() -> None:
        for each, tensor in enumerate(sent):
            one.in_order._begin(1, an_order(10 + each), (tensor,))

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(10)
    for each, tensor in enumerate(sent):
        other.in_order.post(0, an_order(10 + each), (TensorSpec((15_000,), torch.float32, False),))
        assert torch.equal(other.in_order.take(0, an_order(10 + each))[0], tensor)
    assert set(watched) == {threading.get_ident()}


def reborn(linked: Linked, worker: int, kind: type[Links] = Links) -> None:
    """Gives the number of a worker to another process; the one before still has its ends, and reads no more."""
    linked.ends.pop(worker)
    desk = Desk(linked.desks, worker, is_near=True)
    desk.child.pid = 1000 + worker
    linked.desks.by_worker[worker] = desk
    linked.replace(worker, kind(desk))  # type: ignore[arg-type]


class KeepsLink(Links):
    """Keeps the link that it has to a worker: a planted bug."""

    def _adopt(self, peer: int, ends: Ends) -> None:
        link = self._links.get(peer)
        if link is None or link.ends is None:
            super()._adopt(peer, ends)
        else:
            ends.wire.close()


class KeepsEarly(Links):
    """Keeps what came early from a worker whose number another one has: a planted bug."""

    def _adopt(self, peer: int, ends: Ends) -> None:
        before = dict(self._mailbox._early)
        super()._adopt(peer, ends)
        self._mailbox._early |= before


def another_worker_gets_the_number(linked: Linked) -> None:
    """What the process before has sent, also for coming epochs, is nothing of the one that has its number now."""
    one, other = linked.enter(0)
    assert passes(one, other, 1)
    one.abandon()
    ahead = linked.enter_one(0, 2)
    ahead.in_order.send(1, KEY, number(66))
    settle(linked)
    reborn(linked, 0)
    other.abandon()
    one, other = linked.enter_one(0, 2), linked.enter_one(1, 2)
    one.in_order.send(1, OTHER, number(4))
    other.in_order.post(0, OTHER, ONE)
    assert other.in_order.take(0, OTHER)[0].item() == 4
    assert passes(one, other, 5)


def test_another_worker_gets_the_number_of_one_that_is_gone(linked: Linked) -> None:
    another_worker_gets_the_number(linked)


@pytest.mark.parametrize("planted", [KeepsLink, KeepsEarly])
def test_a_link_that_is_reused_for_another_worker_is_found(
    planted: type[Links], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.runtime.linked.WAIT_S", 1.0)
    linked = Linked(0, 1, kind=planted)
    with pytest.raises((AssertionError, TransferFailedError)):
        another_worker_gets_the_number(linked)
    linked.close()


def test_what_is_kept_for_a_link_that_another_one_replaces_is_a_failure(linked: Linked) -> None:
    """It would be lost without a word: its sender counts it as sent."""
    one, other = linked.enter(0)
    assert passes(one, other, 1)
    body = torch.zeros(RING_BYTES)
    one.in_order.send(1, OTHER, (body,))
    assert linked.links[0]._links[1].owes
    made = linked.desks.by_worker[0].given_links
    other_ends = linked.desks.by_worker[1]
    linked.desks.pairs._near(linked.desks.by_worker[0], other_ends)
    assert not made.empty()
    linked.links[0]._adopt_given()
    assert isinstance(one.failed, TransferFailedError) and one.failed.peer == 1


def test_what_was_sent_over_a_link_that_its_peer_has_closed_is_a_failure(linked: Linked) -> None:
    """The sender has not seen the close: the peer, which has a new link, would wait for a message that is lost."""
    one, other = linked.enter(0)
    assert passes(one, other, 1)
    one = linked.enter_one(0, 1)
    one.in_order.send(1, KEY, number(2))
    linked.links[1]._close(linked.links[1]._links[0])
    other = linked.enter_one(1, 1)
    other.in_order.send(0, OTHER, number(3))
    linked.links[0]._adopt_given()
    assert isinstance(one.failed, TransferFailedError) and one.failed.peer == 1


def frame(**fields: int) -> bytes:
    return Frame(
        **({"epoch": 0, "key": 8, "total": 100, "start": 0, "length": 100, "offset": INLINE} | fields)
    ).packed()


GARBAGE = {
    "no frame": b"GET / HTTP/1.1\r\nHost: example.com\r\nAccept: */*\r\n\r\n",
    "too long": frame(total=MOST_BYTES + 1),
    "beyond its message": frame(start=50),
    "no beginning": frame(start=50, length=50),
    "outside of the ring": frame(offset=RING_BYTES - 50),
    "far outside of the ring": frame(offset=INLINE - 1),
    "more than memory": frame(total=MOST_BYTES, length=100),
    "half of one, and another": frame(length=50) + bytes(50) + frame(key=12),
}


@looped("name", GARBAGE)
def test_bytes_that_no_worker_sends_end_their_link_and_nothing_else(name: str) -> None:
    linked = Linked(0, 1, 2)
    one, other, third = linked.enter(0)
    assert passes(one, other, 1)
    third.in_order.send(1, KEY, number(3))
    other.in_order.post(2, KEY, ONE)
    assert other.in_order.take(2, KEY)[0].item() == 3
    other.in_order.post(0, OTHER, ONE)
    socket_of(linked, 0, 1).sendall(GARBAGE[name])
    settle(linked)
    assert isinstance(other.failed, TransferFailedError)
    assert other.failed.peer == 0 and "the link to worker 0 brings no frames" in str(other.failed)
    assert not linked.links[1]._links[2].is_broken
    one, other, third = linked.enter(1)
    assert passes(one, other, 2)
    linked.close()


class WaitsForReader(Links):
    """Sends until all has left: a planted bug."""

    def send(self, target: int, epoch: int, key: int, parts: Sequence[Any]) -> None:
        super().send(target, epoch, key, parts)
        for _ in range(1000):
            if not self._links[target].owes:
                return
            self._push(self._links[target])
        raise TimeoutError("nobody reads")


def both_send_more_than_there_is_room_for(linked: Linked) -> None:
    one, other = linked.enter(0)
    assert passes(one, other, 1)
    border = (TensorSpec((RING_BYTES,), torch.uint8, False),)
    for end, peer in ((one, 1), (other, 0)):
        socket_of(linked, 1 - peer, peer).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        end.in_order.send(peer, OTHER, (torch.full((RING_BYTES,), peer, dtype=torch.uint8),))
        end.in_order.send(peer, OTHER, (torch.full((RING_BYTES,), 5 + peer, dtype=torch.uint8),))
    for end, peer in ((one, 1), (other, 0)):
        for expected in (1 - peer, 6 - peer):
            end.in_order.post(peer, OTHER, border)
            assert bool((end.in_order.take(peer, OTHER)[0] == expected).all())
    settle(linked)
    assert not any(link.owes for links in linked.links.values() for link in links._links.values())


def test_a_send_does_not_wait_for_its_reader(linked: Linked) -> None:
    both_send_more_than_there_is_room_for(linked)


def test_a_send_that_waits_for_a_reader_is_found() -> None:
    linked = Linked(0, 1, kind=WaitsForReader)
    with pytest.raises(TimeoutError):
        both_send_more_than_there_is_room_for(linked)
    linked.close()


@pytest.mark.parametrize("wakes", [1, 2])
def test_a_full_ring_wakes_nobody_for_ever(linked: Linked, wakes: int) -> None:
    """What a ring had no room for is tried again until it has left, and no longer."""
    one, other = linked.enter(0)
    assert passes(one, other, 1)
    for _ in range(wakes):
        one.in_order.send(1, OTHER, (torch.zeros(RING_BYTES // 2),))
    assert linked.desks.by_worker[0].wakeups.retries
    for _ in range(wakes):
        other.in_order.post(0, OTHER, (TensorSpec((RING_BYTES // 2,), torch.float32, False),))
        other.in_order.take(0, OTHER)
    settle(linked)
    assert not linked.desks.by_worker[0].wakeups.retries


def test_a_fence_ends_what_a_full_ring_had_no_room_for(linked: Linked) -> None:
    one, other = linked.enter(0)
    assert passes(one, other, 1)
    for _ in range(3):
        one.in_order.send(1, OTHER, (torch.zeros(RING_BYTES // 2),))
    one, other = linked.enter(1)
    settle(linked)
    assert passes(one, other, 2)
    settle(linked)
    assert not linked.desks.by_worker[0].wakeups.retries


def test_a_message_before_its_link_is_there_is_kept_and_a_fence_drops_it(linked: Linked) -> None:
    desk: Any = linked.desks.by_worker[0]
    held: list[Callable[[], None]] = []
    given = desk.link.send
    desk.link.send = lambda message, fds=(): held.append(lambda: given(message, fds))
    one, _ = linked.enter(0)
    one.in_order.send(1, KEY, number(1))
    assert linked.links[0]._links[1].ends is None and linked.links[0]._links[1].owes
    one.abandon()
    assert not linked.links[0]._links[1].owes
    desk.link.send = given
    assert len(held) == 1


class Narrow:
    """A wire that takes `room` bytes, and then none."""

    room = 100

    def __init__(self) -> None:
        self.taken = b""

    def write(self, parts: Sequence[Any]) -> int:
        if not self.room:
            raise BlockingIOError
        data = b"".join(parts)[: self.room]
        self.taken, self.room = self.taken + data, self.room - len(data)
        return len(data)


def test_the_rest_of_a_frame_behind_a_fence_has_the_bytes_of_before() -> None:
    """The tensors may change from the fence on, and the other end may still be in the epoch of the frame."""
    wire: Any = Narrow()
    link = PeerLink(1, Mailbox(), lambda size: memoryview(bytearray(size)))
    link.attach(Ends(wire))
    body = bytearray(1_000)
    assert link.send(3, 8, [memoryview(body)]) == "socket"
    link.drop_unsent()
    body[:] = b"x" * len(body)
    wire.room = 10_000
    assert link.flush() == ""
    assert wire.taken[-len(body) :] == bytes(len(body))


def test_an_end_that_never_comes_is_given_up_after_a_while(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    links, given = linked.links[0], linked.desks.by_worker[0].given_links

    def begin(epoch: int) -> PeerLink:
        """Sends a message over a link that the agent announces, and whose other end does not come."""
        linked.enter(epoch)[0].in_order.send(1, KEY, number(epoch))
        while not given.empty():
            message, ends = given.get()
            links._newest[1] = message.number, time.monotonic()
            for each in ends:
                os.close(each)
        return links._links[1]

    first = begin(0)
    assert begin(1) is first and not first.is_broken
    monkeypatch.setattr("engine.runtime.transport.links.GREET_S", -1.0)
    assert begin(2) is not first and first.is_broken


def test_without_room_for_a_ring_all_goes_over_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files, `ulimit -f`, is one of shared memory too: no link could be made."""

    def refused(*given: object) -> int:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", refused)
    linked = Linked(0, 1)
    one, other = linked.enter(0)
    large = torch.arange(1 << 20, dtype=torch.float32)
    other.in_order.post(0, an_order(1), (TensorSpec((1 << 20,), torch.float32, False),))
    one.in_order.send(1, an_order(1), (large,))
    assert torch.equal(other.in_order.take(0, an_order(1))[0], large)
    linked.close()


class SlowEnd(Wire):
    """The end of a link that takes so many bytes for each `go_on`."""

    def __init__(self, end: socket.socket, most: int):
        super().__init__(end)
        self.most, self.left = most, 0

    def write(self, buffers: Any) -> int:
        data = b"".join(buffers)[: self.left]
        if not data:
            raise BlockingIOError
        self.left -= (count := super().write([data]))
        return count

    @property
    def has_room(self) -> bool:
        return self.left == self.most


class Arrival(NamedTuple):
    """A receive in a lane, which says when its message has come."""

    lane: int
    arrived: list[int]

    def arrives(self, source: int, room: memoryview) -> None:
        """Adds the lane to those that have come."""
        self.arrived.append(self.lane)


def order_of(messages: Sequence[tuple[int, int, int]], most: int = 1 << 18) -> list[int]:
    """Returns the lanes of the messages as they arrive over a slow link, each a lane, a size, and when it is sent."""
    near, far = socket.socketpair()
    arrived: list[int] = []
    mailbox: Mailbox[Any, memoryview] = Mailbox()
    ends = [PeerLink(peer, mailbox, host_room) for peer in (1, 0)]
    ends[0].attach(Ends(wire := SlowEnd(near, most)))
    ends[1].attach(Ends(Wire(far)))
    mailbox.enter(0)
    for place, (lane, size, _) in enumerate(messages):
        mailbox.post(0, key_of(place, lane), Arrival(lane, arrived), host_room(size))
    for turn in range(1000):
        wire.left = most
        for place, (lane, size, at) in enumerate(messages):
            if at == turn:
                ends[0].send(0, key_of(place, lane), [memoryview(bytes([place]) * size)])
        ends[0].flush()
        ends[1].read()
        if not ends[0].owes and len(arrived) == len(messages):
            break
    ends[0].close()
    ends[1].close()
    return arrived


def test_a_message_of_training_does_not_wait_behind_state_for_another_worker() -> None:
    heal = (STATE, 16 << 20, 0)
    steps = [(IN_ORDER, 1 << 20, 10 * turn) for turn in range(1, 10)]
    assert order_of([heal, *steps]) == [IN_ORDER] * 9 + [STATE]


def test_state_goes_on_while_messages_of_training_wait_all_the_time() -> None:
    busy = [(IN_ORDER, 1 << 20, 0)] * 40
    lanes = order_of([(STATE, 1 << 20, 0), (ASIDE, 1 << 20, 0), *busy])
    assert lanes[0] == ASIDE, "only state waits"
    assert 7 <= lanes.index(STATE) <= 12, "an eighth of the bytes"


class Measured(socket.socket):
    """A connection whose kernel tells this about it."""

    told: tuple[int, ...] = ()

    def getsockopt(self, *which: Any) -> Any:
        """Returns what the kernel tells."""
        return _TCP_INFO.pack(*self.told) if which[:2] == (socket.IPPROTO_TCP, socket.TCP_INFO) else None


@pytest.mark.parametrize(
    ("told", "most"),
    [
        ((1000, 20_000, 900, 20_000, 10_000_000), 450_000),  # of two round trips and 5 ms
        ((1000, 20_000, 200, 20_000, 10_000_000), 200_000),  # it has not shown yet that it carries more
        ((1000, 46_000, 900, 20_000, 10_000_000), 65_536),  # bytes wait in the network: its rate was less than told
        ((1000, 200, 900, 200, 1_000_000), 65_536),
    ],
)
def test_state_fills_a_link_between_hosts_and_no_buffer(told: tuple[int, ...], most: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Measured() as end:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        end.connect(server.getsockname())
        with server.accept()[0] as other:
            end.told = told
            link = PeerLink(1, Mailbox(), host_room)
            link.attach(Ends(Wire(end)))
            assert link.send(0, key_of(0, STATE), [memoryview(bytes(8 << 20))]) == "ring"
            state = _waiting(end)
            assert most - (64 << 10) < state <= most + (65 << 10)
            assert link.send(0, key_of(1, IN_ORDER), [memoryview(bytes(32 << 10))]) == ""
            assert _waiting(end) - state == 48 + (32 << 10)
            other.recv(1)


def _waiting(end: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(end.fileno(), termios.TIOCOUTQ, bytes(4)), "little")
