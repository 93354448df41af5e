"""The rendezvous of a run: its keys, and the workers that are stopped or killed while they set one."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest

from engine.runtime.transport.rendezvous import Rendezvous
from tests.runtime.peers import PeerServer, connect

SOON = timedelta(seconds=10)


def sets(group: str, worker: int) -> None:
    store = connect(group)
    for number in range(500):
        store.set(f"{worker}/{number}", bytes(200))


def sets_without_end(group: str) -> None:
    store = connect(group)
    while True:
        store.set("0", bytes(3000))  # its line spans pages: a death may cut it
        time.sleep(0.0001)


def waits(group: str) -> str:
    store = connect(group)
    store.set("is-there", b"")
    store.wait(["0", "1"], SOON)
    return (store.get("0") + store.get("1")).decode()


def test_each_group_has_its_own_keys_and_a_value_is_any_bytes(peers: PeerServer) -> None:
    first, second = Rendezvous(peers.place, "epoch-1"), Rendezvous(peers.place, "epoch-10")
    first.set("a", bytes(range(256)))
    second.set("a", b"2")
    for store, value in ((first, bytes(range(256))), (second, b"2")):
        store.wait(["a"], SOON)
        assert store.get("a") == value


def test_every_worker_that_waits_hears_of_every_key(peers: PeerServer) -> None:
    own = Rendezvous(peers.place, "waits")
    started = [peers.start(waits, "waits") for _ in range(3)]
    own.wait(["is-there"], SOON)
    for key in ("0", "1"):
        time.sleep(0.02)
        own.set(key, key.encode())
    assert [peer.result() for peer in started] == ["01"] * 3


def test_no_key_of_several_writers_is_lost(peers: PeerServer) -> None:
    for peer in [peers.start(sets, "many", worker) for worker in range(4)]:
        peer.result()
    keys = [f"{worker}/{number}" for worker in range(4) for number in range(500)]
    Rendezvous(peers.place, "many").wait(keys, SOON)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_writer_that_is_stopped_or_killed_delays_no_other(peers: PeerServer, number: signal.Signals) -> None:
    """Before, a server of the keys that was stopped kept a group from forming for seconds."""
    for attempt in range(20):
        group = f"other/{number}/{attempt}"
        own, other = Rendezvous(peers.place, group), peers.start(sets_without_end, group)
        own.wait(["0"], SOON)
        other.child.signal(number)
        own.set("1", b"here")
        own.wait(["1"], timedelta(seconds=2))
        other.child.signal(signal.SIGKILL)


@pytest.mark.parametrize("cut", ['["cut", "b", "00"]', '["cut", "a", "0', "["])
def test_a_line_that_a_death_has_cut_costs_no_other_line(peers: PeerServer, cut: str) -> None:
    store = Rendezvous(peers.place, "cut")
    os.write(peers.place.memory_fd, f"\n{cut}".encode())
    store.set("a", b"whole")
    store.wait(["a"], SOON)
    assert store.get("a") == b"whole"


def test_a_wait_ends_at_its_time_or_when_another_thread_gives_up(peers: PeerServer) -> None:
    store = Rendezvous(peers.place, "nobody")
    with pytest.raises(RuntimeError, match="no worker has set a, b in time"):
        store.wait(["a", "b"], timedelta(seconds=0.02))
    threading.Timer(0.1, store.give_up).start()
    since_s = time.monotonic()
    with pytest.raises(RuntimeError, match="no worker has set a in time"):
        store.wait(["a"], timedelta(minutes=30))
    assert time.monotonic() - since_s < SOON.total_seconds()
