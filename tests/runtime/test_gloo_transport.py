"""The data plane between real processes: what arrives, in which order, while what else happens; and how it is left."""

from __future__ import annotations

import os
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
from engine.core.process_messages import StopMessage
from engine.runtime.ipc.control import Control, Stopped
from engine.runtime.ipc.link import Link
from engine.runtime.transport.gloo_transport import GlooJoining, GlooTransport
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.tensor_spec import TensorSpec
from tests.runtime.peers import PeerServer, an_aside, an_order, connect, plane_of

ROUNDS = 9
TIMEOUT_S = 10.0
# The far end of a control link must outlive its thread: when it closes, the process ends.
far_ends: list[Link] = []


def new_control() -> Control:
    near, far = Link.pair()
    far_ends.append(far)
    return Control(near)


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
    """Three workers, ranked against their numbers: each sends to both others and takes from both."""
    workers = (7, 2, 5)
    plane = plane_of(prefix, worker, workers)
    assert plane.gloo.rank() == workers.index(worker)
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
        plane.in_order.post(other, an_order(9), (spec(0),))
        plane.in_order.send(other, an_order(9), (torch.empty(0),))
    for other in others:
        plane.in_order.take(other, an_order(9))
    plane.release_sent()
    plane.close()
    return taken


def test_workers_are_addressed_by_number_whatever_their_rank(peers: PeerServer) -> None:
    started = [peers.start(exchanges, "three", worker) for worker in (7, 2, 5)]
    assert [peer.result() for peer in started] == [
        [value for other in others for key in (1, 3) for value in (other, worker * 10 + key)]
        for worker, others in ((7, (2, 5)), (2, (7, 5)), (5, (7, 2)))
    ]


def connected_sockets() -> int:
    """Returns how many TCP connections of this process still reach someone."""
    alive = {psutil.CONN_ESTABLISHED, psutil.CONN_SYN_SENT, psutil.CONN_SYN_RECV}
    return sum(each.status in alive for each in psutil.Process().net_connections("tcp4"))


def closes_while_blocked(prefix: str) -> list[Any]:
    """Blocks in a receive that nobody serves and leaves, several times over; the other worker stays where it is."""
    took_s, opened, left, outcomes = [], [], [], []
    for number in range(ROUNDS):
        store = connect(f"{prefix}/{number}")
        with_store = connected_sockets()
        plane = GlooJoining(LinkCuts(new_control()), store, 0, (0, 1)).join()
        opened.append(connected_sockets() - with_store)
        for key in range(3):
            plane.in_order.post(1, an_order(key), (spec(1000),))
        outcome: list[str] = []
        blocked = threading.Thread(target=_take_and_tell, args=(plane, 1, outcome))
        blocked.start()
        time.sleep(0.02)
        start_s = time.monotonic()
        plane.close()
        took_s.append(time.monotonic() - start_s)
        left.append(connected_sockets() - with_store)
        blocked.join(2.0)
        outcomes += outcome
    waiters = [each.name for each in threading.enumerate() if each.name.startswith("from-")]
    return [took_s, opened, left, outcomes, waiters]


def is_left_behind(prefix: str) -> list[str]:
    """Is blocked in a receive from a worker that leaves, several times over."""
    outcomes: list[str] = []
    for number in range(ROUNDS):
        plane = plane_of(f"{prefix}/{number}", 1)
        _take_and_tell(plane, 0, outcomes, posts=True)
        plane.close()
    return outcomes


def _take_and_tell(plane: GlooTransport, source: int, outcome: list[str], *, posts: bool = False) -> None:
    try:
        if posts:  # the other worker may have left since
            plane.in_order.post(source, an_order(1), (spec(1000),))
        plane.in_order.take(source, an_order(1))
    except TransferFailedError as error:
        outcome.append(str(error).partition(" failed:")[0])


def test_close_ends_a_blocked_receive_at_once(peers: PeerServer) -> None:
    (took_s, opened, left, outcomes, waiters), others = run_peers(peers, closes_while_blocked, is_left_behind)
    assert min(took_s) < 0.1  # which a busy machine only makes longer
    assert min(opened) >= 1
    assert left == [0] * ROUNDS, "a connection of the plane is still alive"
    assert waiters == []
    assert outcomes == ["transfer from worker 1"] * ROUNDS
    assert others == ["transfer from worker 0"] * ROUNDS


def leaves_and_keeps_all_ends(prefix: str, worker: int) -> list[tuple[int, int]]:
    """Leaves groups whose ends it keeps; returns its descriptors and threads, before the first and after each."""
    process, other = psutil.Process(), 1 - worker
    controls, kept = [new_control() for _ in range(ROUNDS)], []
    has = [(process.num_fds(), process.num_threads())]
    for number, control in enumerate(controls):
        plane = GlooJoining(LinkCuts(control), connect(f"{prefix}/{number}"), worker, (0, 1)).join()
        plane.in_order.post(other, an_order(1), (spec(1),))
        plane.in_order.send(other, an_order(1), (torch.ones(1),))
        plane.in_order.take(other, an_order(1))
        plane.release_sent()
        plane.close()
        kept.append(plane)
        with pytest.raises(TransferFailedError, match="the group was left"):
            plane.in_order.send(other, an_order(2), (torch.ones(1),))
        has.append((process.num_fds(), process.num_threads()))
    return has


def test_a_group_that_was_left_holds_no_descriptor_and_no_thread(peers: PeerServer) -> None:
    started = [peers.start(leaves_and_keeps_all_ends, "kept", worker) for worker in (0, 1)]
    for peer in started:
        before, *after = peer.result()
        assert max(fds for fds, _ in after) <= before[0], after
        assert max(threads for _, threads in after) <= before[1] + 1, after


def is_stopped_while_blocked(prefix: str) -> list[float]:
    """Blocks in a take until its agent says stop; returns the seconds from the word to the main thread."""
    took_s = []
    for number in range(ROUNDS):
        near, far = Link.pair()
        far_ends.append(far)
        plane = GlooJoining(LinkCuts(Control(near)), connect(f"{prefix}/{number}"), 0, (0, 1)).join()
        plane.in_order.post(1, an_order(0), (spec(10),))
        said_s: list[float] = []
        threading.Timer(0.02, _say_stop, (far, said_s)).start()
        with pytest.raises(Stopped):
            plane.in_order.take(1, an_order(0))
        took_s.append(time.monotonic() - said_s[0])
        plane.close()
    return took_s


def _say_stop(link: Link, said_s: list[float]) -> None:
    said_s.append(time.monotonic())
    link.send(StopMessage())


def test_the_agents_word_wakes_a_blocked_take(peers: PeerServer) -> None:
    took_s, _ = run_peers(peers, is_stopped_while_blocked, is_left_behind)
    assert min(took_s) < 0.02


def dies(prefix: str) -> None:
    plane = plane_of(prefix, 0)
    plane.in_order.post(1, an_order(200), (spec(1),))
    plane.in_order.take(1, an_order(200))  # the other has joined
    os._exit(0)


def is_left(prefix: str) -> list[str]:
    plane = plane_of(prefix, 1)
    plane.in_order.post(0, an_order(0), (spec(1),))
    plane.in_order.send(0, an_order(200), (torch.ones(1),))  # the other dies of it
    texts = []
    for _ in range(2):  # the failure stays
        with pytest.raises(TransferFailedError) as failed:
            plane.in_order.take(0, an_order(0))
        texts.append(str(failed.value).partition(" failed: ")[0])
    with pytest.raises(TransferFailedError) as failed:
        _send_and_reap(plane)
    plane.close()
    return [*texts, str(failed.value).partition(" failed: ")[0]]


def _send_and_reap(plane: GlooTransport) -> None:
    # The first sends after a death may still find the socket open.
    for key in range(1, 100):
        plane.in_order.send(0, an_order(key), (torch.ones(1 << 16),))
        plane.release_sent()


def test_a_dead_worker_is_suspected_by_name(peers: PeerServer) -> None:
    peers.start(dies, "death")
    assert peers.start(is_left, "death").result() == [
        "transfer from worker 0",
        "transfer from worker 0",
        "transfer to worker 0",
    ]


def finds_nobody(prefix: str) -> str:
    with pytest.raises(TransferFailedError) as failed:
        plane_of(prefix, 0, timeout_s=0.2)
    return str(failed.value).partition(" failed: ")[0]


def test_a_worker_that_never_joins_is_a_suspicion(peers: PeerServer) -> None:
    assert peers.start(finds_nobody, "nobody").result() == "joining the others"


def lists_listeners(prefix: str, worker: int) -> list[str]:
    plane = plane_of(prefix, worker)
    listening = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    plane.in_order.post(1 - worker, an_order(0), (spec(0),))
    plane.in_order.send(1 - worker, an_order(0), (torch.empty(0),))
    plane.in_order.take(1 - worker, an_order(0))
    plane.release_sent()
    plane.close()
    return sorted(set(listening))


def test_the_plane_listens_on_loopback_only(peers: PeerServer) -> None:
    started = [peers.start(lists_listeners, "listen", worker) for worker in (0, 1)]
    assert [peer.result() for peer in started] == [["127.0.0.1"], ["127.0.0.1"]]
