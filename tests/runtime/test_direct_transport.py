"""The data plane between real processes: what arrives, in which order, while what else happens; and how it is left.

What needs no second process is in `test_direct_ends.py`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from engine.core.errors import TransferFailedError
from engine.core.messages import StopMessage
from engine.runtime.process.control import Stopped
from engine.runtime.transport.transport import TensorSpec, Transport
from tests.runtime.peers import PeerServer, PeerWorker, an_aside, an_order, connect, plane_of

ROUNDS = 9
TIMEOUT_S = 10.0


def run_peers(peers: PeerServer, *functions: Any) -> list[Any]:
    """Runs one peer per function, worker 0 first, and returns their answers."""
    prefix = "/".join(each.__name__ for each in functions)
    started = [peers.start(each, prefix) for each in functions]
    return [peer.result() for peer in started]


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype, False)


def sends_out_of_step(prefix: str) -> None:
    plane = plane_of(prefix, 0)
    for key in range(40):
        plane.in_order.send(
            1, an_order(key), (torch.full((8, 3), float(key)), torch.full((2,), key, dtype=torch.int64))
        )
    plane.in_order.post(1, an_order(100), (spec(0),))
    plane.in_order.take(1, an_order(100))
    plane.release_sent()
    plane.close()


def takes_all(prefix: str) -> list[list[Any]]:
    plane = plane_of(prefix, 1)
    for key in range(40):
        plane.in_order.post(0, an_order(key), (spec(8, 3), spec(2, dtype=torch.int64)))
    # Taken in another order than posted, which is the order of sending.
    taken = {key: plane.in_order.take(0, an_order(key)) for key in reversed(range(40))}
    plane.in_order.send(0, an_order(100), (torch.empty(0),))
    plane.release_sent()
    plane.close()
    return [[key, *(sorted(set(tensor.flatten().tolist())) for tensor in taken[key])] for key in sorted(taken)]


def test_tuples_arrive_under_their_keys(peers: PeerServer) -> None:
    _, taken = run_peers(peers, sends_out_of_step, takes_all)
    assert taken == [[key, [float(key)], [key]] for key in range(40)]


KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


def samples() -> list[Tensor]:
    """Returns tensors of every kind: empty ones, numbers without shape, views that are not contiguous."""
    made = [(torch.arange(12) % 5).reshape(3, 4).to(dtype) for dtype in KINDS]
    made += [torch.empty(0), torch.empty(3, 0, 2), torch.tensor(1.5), torch.arange(12.0).reshape(3, 4).t()]
    return [*made, torch.tensor([float("nan"), -0.0, float("inf")])]


def sends_aside(prefix: str) -> bool:
    plane = plane_of(prefix, 0)
    plane.in_order.send(1, an_order(1), (torch.ones(4),))
    plane.in_order.post(1, an_order(2), (spec(1),))
    plane.in_order.take(1, an_order(2))
    stream = torch.full((1 << 20,), 7.0)
    released = weakref.ref(stream)
    plane.aside.send(1, an_aside(7), (stream,))
    del stream
    plane.in_order.post(1, an_order(3), (spec(1),))
    plane.in_order.take(1, an_order(3))  # it has been received
    until_s = time.monotonic() + TIMEOUT_S
    while released() is not None and time.monotonic() < until_s:
        time.sleep(0.01)
    plane.close()
    return released() is None


def posts_aside_first(prefix: str) -> list[Any]:
    plane = plane_of(prefix, 1)
    plane.aside.post(0, an_aside(7), (spec(1 << 20),))
    plane.in_order.post(0, an_order(1), (spec(4),))
    (first,) = plane.in_order.take(0, an_order(1))
    too_early = plane.aside.take_arrived(0, an_aside(7))
    plane.in_order.send(0, an_order(2), (torch.zeros(1),))
    (stream,) = plane.aside.take(0, an_aside(7))
    plane.in_order.send(0, an_order(3), (torch.zeros(1),))
    plane.release_sent()
    plane.close()
    return [first.tolist(), too_early, stream.unique().tolist()]


def test_what_is_sent_aside_is_let_go_and_holds_nobody_up(peers: PeerServer) -> None:
    """It is posted first and sent last."""
    let_go, taken = run_peers(peers, sends_aside, posts_aside_first)
    assert let_go
    assert taken == [[1.0] * 4, None, [7.0]]


def sends_samples(prefix: str) -> None:
    plane = plane_of(prefix, 0)
    plane.in_order.send(1, an_order(0), tuple(samples()))
    plane.in_order.post(1, an_order(1), (spec(1),))
    plane.in_order.take(1, an_order(1))
    plane.release_sent()
    plane.close()


def compares_samples(prefix: str) -> list[bool]:
    plane = plane_of(prefix, 1)
    plane.in_order.post(0, an_order(0), tuple(TensorSpec.of(tensor) for tensor in samples()))
    taken = plane.in_order.take(0, an_order(0))
    plane.in_order.send(0, an_order(1), (torch.ones(1),))
    plane.release_sent()
    plane.close()
    return [
        one.dtype == other.dtype
        and one.shape == other.shape
        and (torch.equal(one, other) or repr(one.tolist()) == repr(other.tolist()))
        for one, other in zip(taken, samples(), strict=True)
    ]


def test_every_kind_of_tensor_arrives_as_it_was(peers: PeerServer) -> None:
    _, same = run_peers(peers, sends_samples, compares_samples)
    assert same == [True] * len(samples())


def sends_one(prefix: str) -> None:
    plane = plane_of(prefix, 0)
    plane.in_order.send(1, an_order(0), (torch.ones(1 << 20),))
    plane.in_order.post(1, an_order(1), (spec(1),))
    plane.in_order.take(1, an_order(1))
    plane.release_sent()
    plane.close()


def computes_meanwhile(prefix: str) -> bool:
    plane = plane_of(prefix, 1)
    plane.in_order.post(0, an_order(0), (spec(1 << 20),))
    deadline_s = time.monotonic() + 10
    # Nothing here asks for the transfer; it must come on its own.
    while not plane.in_order.has_arrived(0, an_order(0)) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    came = plane.in_order.has_arrived(0, an_order(0))
    plane.in_order.take(0, an_order(0))
    plane.in_order.send(0, an_order(1), (torch.ones(1),))
    plane.release_sent()
    plane.close()
    return came


def test_transfers_overlap_with_whatever_the_main_thread_does(peers: PeerServer) -> None:
    _, found = run_peers(peers, sends_one, computes_meanwhile)
    assert found


def sends_large(prefix: str) -> None:
    plane = plane_of(prefix, 0)
    plane.in_order.send(1, an_order(0), (torch.ones(1 << 22),))  # far more than sockets hold
    connect(prefix).set("sent", b"yes")
    plane.in_order.post(1, an_order(1), (spec(1),))
    plane.in_order.take(1, an_order(1))
    plane.release_sent()
    plane.close()


def posts_when_it_was_sent(prefix: str) -> float:
    plane = plane_of(prefix, 1)
    connect(prefix).wait(["sent"], timedelta(seconds=TIMEOUT_S))
    plane.in_order.post(0, an_order(0), (spec(1 << 22),))
    (tensor,) = plane.in_order.take(0, an_order(0))
    plane.in_order.send(0, an_order(1), (torch.ones(1),))
    plane.release_sent()
    plane.close()
    return tensor.sum().item()


def test_a_send_does_not_wait_for_its_receive(peers: PeerServer) -> None:
    _, total = run_peers(peers, sends_large, posts_when_it_was_sent)
    assert total == 1 << 22


def exchanges(prefix: str, worker: int) -> list[float]:
    """Three workers: each sends to both others and takes from both."""
    workers = (7, 2, 5)
    plane = plane_of(prefix, worker, workers)
    others = [each for each in workers if each != worker]
    for other in others:
        for key in (3, 1):
            plane.in_order.post(other, an_order(key), (spec(2),))
    for other in others:
        for key in (3, 1):
            plane.in_order.send(other, an_order(key), (torch.tensor([float(worker), float(other * 10 + key)]),))
    taken = [
        value for other in others for key in (1, 3) for value in plane.in_order.take(other, an_order(key))[0].tolist()
    ]
    for other in others:
        part(plane, other)
    plane.close()
    return taken


def part(plane: Transport, other: int) -> None:
    """Waits until the other has all that it needs."""
    plane.in_order.post(other, an_order(999), (spec(0),))
    plane.in_order.send(other, an_order(999), (torch.empty(0),))
    plane.in_order.take(other, an_order(999))


def test_workers_are_addressed_by_number(peers: PeerServer) -> None:
    started = [peers.start(exchanges, "three", worker) for worker in (7, 2, 5)]
    assert [peer.result() for peer in started] == [
        [value for other in others for key in (1, 3) for value in (other, worker * 10 + key)]
        for worker, others in ((7, (2, 5)), (2, (7, 5)), (5, (7, 2)))
    ]


def goes_through_epochs(prefix: str, worker: int, num_epochs: int) -> list[list[int]]:
    """Exchanges messages in many epochs, and leaves others behind unread; returns descriptors and threads."""
    process, me, other = psutil.Process(), PeerWorker(prefix, worker), 1 - worker
    has, ends = [], []
    for epoch in range(num_epochs):
        plane = me.enter(epoch)
        plane.in_order.post(other, an_order(1), (spec(2),))
        plane.in_order.send(other, an_order(1), (torch.full((2,), float(epoch)),))
        plane.in_order.send(other, an_order(2), (torch.ones(1 << 10),))  # nobody takes it
        plane.aside.post(other, an_aside(3), (spec(5),))  # nobody sends it
        (taken,) = plane.in_order.take(other, an_order(1))
        assert taken.tolist() == [epoch, epoch]
        plane.abandon()
        ends.append(plane)
        has.append([process.num_fds(), process.num_threads(), len(me.links._mailbox._early)])
    part(me.enter(num_epochs), other)
    return has


@pytest.mark.timeout(60)
def test_epochs_cost_no_descriptor_and_no_thread(peers: PeerServer) -> None:
    """Also while the ends of all groups before are kept."""
    started = [peers.start(goes_through_epochs, "epochs", worker, 200) for worker in (0, 1)]
    for has in [each.result() for each in started]:
        first, *rest = has[1:]
        assert max(fds for fds, _, _ in rest) <= first[0], has
        assert max(threads for _, threads, _ in rest) <= first[1], has
        assert max(early for _, _, early in rest) <= 2, "messages of older epochs are kept"


def closes_while_blocked(prefix: str) -> list[Any]:
    """Waits for what nobody sends, and leaves, several times over; the other worker stays where it is."""
    me, took_s, outcomes = PeerWorker(prefix, 0), [], []
    for number in range(ROUNDS):
        plane = me.enter(number)
        plane.in_order.post(1, an_order(1), (spec(1000),))
        said_s: list[float] = []

        def fence(said_s: list[float] = said_s) -> None:
            said_s.append(time.monotonic())
            me.control._take_in(StopMessage(), [])

        threading.Timer(0.02, fence).start()
        with pytest.raises(Stopped):
            plane.in_order.take(1, an_order(1))
        plane.close()
        took_s.append(time.monotonic() - said_s[0])
        outcomes.append(plane.failed)
        me.control.hear()
    connect(prefix).set("over", b"yes")
    return [took_s, [each for each in outcomes if each is not None]]


def stays(prefix: str) -> None:
    plane_of(prefix, 1)
    connect(prefix).wait(["over"], timedelta(seconds=TIMEOUT_S))


def test_the_agents_word_ends_a_wait_at_once(peers: PeerServer) -> None:
    (took_s, failed), _ = run_peers(peers, closes_while_blocked, stays)
    assert min(took_s) < 0.02  # which a busy machine only makes longer
    assert failed == []


def dies(prefix: str) -> None:
    plane = plane_of(prefix, 0)
    plane.in_order.send(1, an_order(100), (torch.ones(1),))
    plane.in_order.post(1, an_order(200), (spec(1),))
    plane.in_order.take(1, an_order(200))
    os._exit(0)


def is_left(prefix: str) -> list[Any]:
    plane = plane_of(prefix, 1)
    plane.in_order.post(0, an_order(0), (spec(1),))
    plane.in_order.send(0, an_order(200), (torch.ones(1),))  # the other dies of it
    texts = []
    for _ in range(2):  # the failure stays
        with pytest.raises(TransferFailedError) as failed:
            plane.in_order.take(0, an_order(0))
        texts.append([str(failed.value), failed.value.peer])
    with pytest.raises(TransferFailedError) as failed:
        plane.in_order.send(0, an_order(1), (torch.ones(1),))
    texts.append([str(failed.value), failed.value.peer])
    plane.in_order.post(0, an_order(100), (spec(1),))  # it came before
    came = plane.in_order.take_arrived(0, an_order(100))
    assert came is not None
    with pytest.raises(TransferFailedError):
        plane.in_order.post(0, an_order(101), (spec(1),))
    plane.close()
    return [*texts, came[0].item()]


def test_a_dead_worker_is_suspected_by_name_and_what_it_has_sent_counts(peers: PeerServer) -> None:
    peers.start(dies, "death")
    assert peers.start(is_left, "death").result() == [
        ["transfer from worker 0 failed: its link has ended", 0],
        ["transfer from worker 0 failed: its link has ended", 0],
        ["transfer to worker 0 failed: its link has ended", 0],
        1.0,
    ]


def lives_on(prefix: str) -> list[float]:
    """Awaits nothing of worker 2, which dies, and goes on with worker 1."""
    plane = plane_of(prefix, 0, (0, 1, 2))
    plane.in_order.post(2, an_order(1), (spec(1),))
    plane.in_order.take(2, an_order(1))
    connect(prefix).set("may die", b"yes")
    connect(prefix).wait(["dead"], timedelta(seconds=TIMEOUT_S))
    taken = []
    for key in (2, 3):
        plane.in_order.post(1, an_order(key), (spec(1),))
        plane.in_order.send(1, an_order(key), (torch.ones(1),))
        taken.append(plane.in_order.take(1, an_order(key))[0].item())
    part(plane, 1)
    return [*taken, float(plane.links._links[2].is_broken)]


def answers(prefix: str) -> None:
    plane = plane_of(prefix, 1, (0, 1, 2))
    for key in (2, 3):
        plane.in_order.post(0, an_order(key), (spec(1),))
        plane.in_order.send(0, an_order(key), (torch.full((1,), float(key)),))
        plane.in_order.take(0, an_order(key))
    part(plane, 0)


def dies_when_told(prefix: str) -> None:
    plane = plane_of(prefix, 2, (0, 1, 2))
    plane.in_order.send(0, an_order(1), (torch.ones(1),))
    plane.cuts.waiter.wait_until(lambda: plane.links._links[0].ends)
    connect(prefix).wait(["may die"], timedelta(seconds=TIMEOUT_S))


def test_the_end_of_a_worker_fails_nothing_that_is_not_awaited_from_it(peers: PeerServer) -> None:
    started = [peers.start(each, "bystander") for each in (lives_on, answers, dies_when_told)]
    assert started[2].result() is None
    started[2].child.wait(TIMEOUT_S)
    _tell(peers, "bystander", "dead")
    assert started[0].result() == [2.0, 3.0, 1.0]


def _tell(peers: PeerServer, prefix: str, word: str) -> None:
    assert peers.start(tells, prefix, word).result() is None


def tells(prefix: str, word: str) -> None:
    connect(prefix).set(word, b"yes")


BODY = 64 << 20  # as large as the ring, and larger with what else is under way


def sends_bodies(prefix: str, worker: int, socket_bytes: int) -> float:
    """Sends the neighbour a large body and many small ones, and takes its: nobody posts before all are sent."""
    me, other = PeerWorker(prefix, worker), 1 - worker
    plane = me.enter(0)
    part(plane, other)  # the link is there
    ends = me.links._links[other].ends
    assert ends is not None
    if socket_bytes:
        ends.wire._end.setsockopt(1, 7, socket_bytes)  # SOL_SOCKET, SO_SNDBUF
    body = torch.arange(BODY // 8, dtype=torch.int64) + worker
    since_s = time.monotonic()
    plane.in_order.send(other, an_order(0), (body, body[:5]))
    for key in range(1, 200):
        plane.in_order.send(other, an_order(key), (torch.full((1 << 10,), float(key)),))
    took_s = time.monotonic() - since_s
    plane.in_order.post(other, an_order(0), (TensorSpec.of(body), TensorSpec.of(body[:5])))
    for key in range(1, 200):
        plane.in_order.post(other, an_order(key), (spec(1 << 10),))
    large, few = plane.in_order.take(other, an_order(0))
    assert torch.equal(large, torch.arange(BODY // 8) + other) and few.tolist() == large[:5].tolist()
    for key in range(1, 200):
        (small,) = plane.in_order.take(other, an_order(key))
        assert small.unique().tolist() == [key]
    part(plane, other)
    return took_s


@pytest.mark.timeout(60)
@pytest.mark.parametrize("socket_bytes", [4 << 10, 0])
def test_neighbours_that_send_each_other_more_than_there_is_room_for_do_not_wait(
    peers: PeerServer, socket_bytes: int
) -> None:
    """The ring is full, and so is the socket; what is kept leaves while both wait for what they receive."""
    started = [peers.start(sends_bodies, f"bodies {socket_bytes}", worker, socket_bytes) for worker in (0, 1)]
    assert max(each.result() for each in started) < TIMEOUT_S


def sends_more_than_the_ring(prefix: str) -> float:
    plane = plane_of(prefix, 0)
    body = torch.arange(BODY // 4, dtype=torch.int32)
    for key in range(4):
        plane.in_order.send(1, an_order(key), (body + key,))
    part(plane, 1)
    return 0.0


def takes_after_a_stop(prefix: str) -> list[bool]:
    plane = plane_of(prefix, 1)
    same = []
    for key in range(4):
        plane.in_order.post(0, an_order(key), (spec(BODY // 4, dtype=torch.int32),))
        if key == 1:
            connect(prefix).set("may stop", b"yes")
        (taken,) = plane.in_order.take(0, an_order(key))
        same.append(torch.equal(taken, torch.arange(BODY // 4, dtype=torch.int32) + key))
    part(plane, 0)
    return same


def waits_for(prefix: str, word: str) -> None:
    connect(prefix).wait([word], timedelta(seconds=TIMEOUT_S))


@pytest.mark.timeout(60)
def test_a_receiver_that_stands_still_in_a_body_goes_on(peers: PeerServer) -> None:
    sender, receiver = peers.start(sends_more_than_the_ring, "stop"), peers.start(takes_after_a_stop, "stop")
    peers.start(waits_for, "stop", "may stop").result()
    receiver.child.signal(signal.SIGSTOP)
    time.sleep(0.5)
    assert psutil.Process(sender.child.pid).status() != psutil.STATUS_STOPPED
    receiver.child.signal(signal.SIGCONT)
    assert receiver.result() == [True] * 4
    sender.result()


def asks_at_once(prefix: str, worker: int) -> list[Any]:
    """Both send first, so that both ask for a link; returns how many links they got."""
    me, other = PeerWorker(prefix, worker), 1 - worker
    store, got = connect(prefix), []
    take_in = me.control._take_in

    def counted(message: Any, fds: list[int]) -> None:
        got.extend(fds)
        take_in(message, fds)

    me.control._take_in = counted  # type: ignore[method-assign]
    plane = me.enter(0)
    store.set(f"ready {worker}", b"yes")
    store.wait([f"ready {other}"], timedelta(seconds=TIMEOUT_S))
    for key in range(3):
        plane.in_order.send(other, an_order(key), (torch.full((2,), float(key)),))
        plane.in_order.post(other, an_order(key), (spec(2),))
    taken = [plane.in_order.take(other, an_order(key))[0].tolist() for key in range(3)]
    part(plane, other)
    return [len(got), taken]


@pytest.mark.parametrize("number", range(3))
def test_two_workers_that_want_a_link_at_once_get_one(peers: PeerServer, number: int) -> None:
    started = [peers.start(asks_at_once, f"at once {number}", worker) for worker in (0, 1)]
    assert [each.result() for each in started] == [[3, [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]]] * 2


def listens(prefix: str, worker: int) -> list[str]:
    plane = plane_of(prefix, worker)
    part(plane, 1 - worker)
    return [str(each.laddr) for each in psutil.Process().net_connections()]


def test_workers_of_one_host_have_no_port(peers: PeerServer) -> None:
    started = [peers.start(listens, "listen", worker) for worker in (0, 1)]
    assert [peer.result() for peer in started] == [[], []]
