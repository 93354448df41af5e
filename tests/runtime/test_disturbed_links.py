"""Disturbed links: what arrives late, not at all or in part, over sockets of one host, TCP and TLS."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.core.errors import TransferFailedError
from engine.core.links import Disturbance, Frame, FrameCount
from engine.runtime.agent.host_registry import new_certificate
from engine.runtime.transport.direct_transport import DirectTransport
from engine.runtime.transport.link_wire import Wire, disturbed
from engine.runtime.transport.transport import TensorSpec
from tests.runtime.linked import Linked
from tests.runtime.peers import an_order

SIZES = (1, 3, 1 << 20, 2)  # numbers in the messages 0 to 3; the third one travels in pieces
BORDERS = {number: (TensorSpec((size,), torch.float32, False),) for number, size in enumerate(SIZES)}
NETWORKS: dict[str, Callable[[], dict[str, str] | None]] = {
    "host": lambda: None,
    "tcp": dict,
    "tls": lambda: new_certificate()._asdict(),
}
Met = list[tuple[int, int]]


@pytest.fixture(params=NETWORKS)
def pair(request: pytest.FixtureRequest) -> Iterator[Linked]:
    made = Linked(0, 1, network=NETWORKS[request.param]())
    yield made
    made.close()


def entered(pair: Linked, epoch: int = 0) -> tuple[DirectTransport, DirectTransport]:
    """Returns both ends in a group, over a link that has carried a message each way."""
    one, other = pair.enter(epoch)
    for end, peer, back in ((one, 1, other), (other, 0, one)):
        end.in_order.send(peer, an_order(9), (torch.ones(1),))
        back.in_order.post(1 - peer, an_order(9), BORDERS[0])
    assert one.in_order.take(1, an_order(9))[0].item() == other.in_order.take(0, an_order(9))[0].item() == 1.0
    return one, other


def disturb(pair: Linked, disturbance: Disturbance, worker: int = 0) -> Met:
    met: Met = []
    assert pair.links[worker].disturb(1 - worker, disturbance, lambda *counts: met.append(counts))
    return met


def send_all(end: DirectTransport, target: int) -> None:
    for number, size in enumerate(SIZES):
        end.in_order.send(target, an_order(number), (torch.arange(size, dtype=torch.float32) + number,))


def post_all(end: DirectTransport, source: int) -> None:
    for number, border in BORDERS.items():
        end.in_order.post(source, an_order(number), border)


def take_all(end: DirectTransport, source: int) -> None:
    for number, size in enumerate(SIZES):
        (found,) = end.in_order.take(source, an_order(number))
        assert torch.equal(found, torch.arange(size, dtype=torch.float32) + number)


def look(pair: Linked, for_s: float) -> None:
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        pair.desks.look()


@pytest.mark.parametrize("direction", ["there", "back", "both"])
def test_delayed_messages_come_late_whole_and_in_order(pair: Linked, direction: str) -> None:
    one, other = entered(pair)
    met = disturb(pair, Disturbance("delay", direction, by_ns=80_000_000))
    ways = {"there": (one, 1, other, 0), "back": (other, 0, one, 1)}
    for way, (sender, target, receiver, source) in ways.items():
        began_s = time.monotonic()
        post_all(receiver, source)
        send_all(sender, target)
        take_all(receiver, source)
        assert time.monotonic() - began_s > (0.08 if direction in (way, "both") else 0)
    ((there, back),) = met
    assert (there > 0, back > 0) == (direction != "back", direction == "back")


@pytest.mark.parametrize("direction", ["there", "back"])
def test_a_stall_takes_all_and_delivers_it_after_its_end(pair: Linked, direction: str) -> None:
    one, other = entered(pair)
    began_s = time.monotonic()
    met = disturb(pair, Disturbance("stall", direction, for_ns=250_000_000))
    sender, target, receiver, source = (one, 1, other, 0) if direction == "there" else (other, 0, one, 1)
    post_all(receiver, source)
    send_all(sender, target)
    look(pair, 0.1)
    while pair.links[source]._links[target].owes:  # until all was taken
        look(pair, 0.01)
    found = [receiver.in_order.has_arrived(source, an_order(number)) for number in BORDERS]
    assert not any(found) or time.monotonic() - began_s > 0.25, "all was taken, and none has come"
    take_all(receiver, source)
    assert time.monotonic() - began_s > 0.25
    assert [sum(each) > 0 for each in met] == [True]


def test_a_stall_goes_on_in_the_next_group_and_ends_with_its_link(pair: Linked) -> None:
    one, other = entered(pair)
    disturb(pair, Disturbance("stall", "there"))
    send_all(one, 1)
    one, other = pair.enter(1)
    post_all(other, 0)
    send_all(one, 1)
    look(pair, 0.1)
    assert other.traffic()[0].received == 0 and other.failed is None
    pair.links[1]._fail(pair.links[1]._links[0], TransferFailedError("planted", 0))
    look(pair, 0.1)
    one, other = entered(pair, 2)
    post_all(other, 0)
    send_all(one, 1)
    take_all(other, 0)


@pytest.mark.parametrize("direction", ["there", "back"])
def test_a_reset_leaves_no_part_of_a_message_and_a_new_link_brings_it_again(pair: Linked, direction: str) -> None:
    one, other = entered(pair)
    before = {worker: links._newest[1 - worker][0] for worker, links in pair.links.items()}
    met = disturb(pair, Disturbance("reset", direction))
    sender, target, receiver, source = (one, 1, other, 0) if direction == "there" else (other, 0, one, 1)
    receiver.in_order.post(source, an_order(3), BORDERS[3])
    sender.in_order.send(target, an_order(3), (torch.full((2,), 7.0),))
    with pytest.raises(TransferFailedError, match=f"from worker {source} failed: its link has ended"):
        receiver.in_order.take(source, an_order(3))
    assert met == [(1, 0) if direction == "there" else (0, 1)]
    while not all(links._links[1 - worker].is_broken for worker, links in pair.links.items()):
        look(pair, 0.001)  # one end may see it later, and would begin the next group over this link
    one, other = entered(pair, 1)
    after = {worker: links._newest[1 - worker][0] for worker, links in pair.links.items()}
    assert after[0] == after[1] > before[0] == before[1]
    for sender, target, receiver, source in ((one, 1, other, 0), (other, 0, one, 1)):
        post_all(receiver, source)
        send_all(sender, target)
        take_all(receiver, source)


def test_a_fault_of_a_link_that_nothing_comes_over_meets_nothing(pair: Linked) -> None:
    one, other = entered(pair)
    for kind in ("delay", "stall", "reset"):
        assert disturb(pair, Disturbance(kind, for_ns=1)) == []
    look(pair, 0.05)
    assert not pair.links[0].disturb(5, Disturbance("stall"), lambda *counts: None), "there is no link"
    one.close()
    other.close()


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("pair", ["tcp", "tls"], indirect=True)
def test_a_fault_may_begin_inside_a_frame(pair: Linked, worker: int) -> None:
    """A part of a message has left or come; its rest passes through the fault, and is one frame of its count."""
    one, other = entered(pair)
    size = 8 << 20
    large = torch.arange(size, dtype=torch.float32)
    other.in_order.post(0, an_order(1), (TensorSpec((size,), torch.float32, False),))
    one.in_order.send(1, an_order(1), (large,))
    pair.desks.look()
    assert pair.links[0]._links[1]._rest and pair.links[1]._links[0]._reader.rest != (b"", 0)
    met = disturb(pair, Disturbance("delay", "both", by_ns=20_000_000), worker)
    assert torch.equal(other.in_order.take(0, an_order(1))[0], large)
    assert [each[worker] > 0 == each[1 - worker] for each in met] == [True]


def test_delayed_messages_of_a_worker_that_is_gone_still_come(pair: Linked) -> None:
    one, other = entered(pair)
    disturb(pair, Disturbance("delay", "back", by_ns=50_000_000))
    post_all(one, 1)
    send_all(other, 0)
    while pair.links[1]._links[0].owes:
        pair.desks.look()
    pair.links[1].close()
    take_all(one, 1)


def test_a_reset_of_tcp_is_one_for_the_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        ours = socket.create_connection(door.getsockname())
        peer, _ = door.accept()
    frame = Frame(0, 1, 3, 0, 3).packed() + b"abc"
    worker = disturbed(Wire(ours), Disturbance("reset"), b"", FrameCount(), lambda *counts: None)
    worker.write([frame])
    peer.settimeout(10)
    with peer:
        assert peer.recv(100) == frame[:-1]
        with pytest.raises(ConnectionResetError):
            peer.recv(100)
    worker.close()


def test_the_threads_end_with_their_links(pair: Linked) -> None:
    entered(pair)
    disturb(pair, Disturbance("stall"))
    disturb(pair, Disturbance("delay", by_ns=1))
    found = [each for each in threading.enumerate() if each.name == "disturbed link"]
    assert len(found) >= 2
    pair.links[0].close()
    for each in found:
        each.join(10)
        assert not each.is_alive()


def test_a_link_to_another_host_tells_its_rate_once_it_was_full() -> None:
    """The reader takes 8 MB/s; a link on one host has no rate, nor one that has carried little."""
    here, there = socket.socketpair()
    with here, there:
        assert Wire(here).bytes_per_s == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    with near, far:
        wire, until_s = Wire(near), time.monotonic() + 0.5
        wire.write([b"x" * 1000])
        assert len(far.recv(1000)) == 1000
        assert wire.bytes_per_s == 0
        while time.monotonic() < until_s:
            with contextlib.suppress(BlockingIOError):
                wire.write([bytes(1 << 20)])
            time.sleep(0.004)
            far.recv(32 << 10)
        assert 1e5 < wire.bytes_per_s < 1e8
