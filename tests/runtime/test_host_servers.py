"""The hosts of a run, as the one that coordinates judges them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from engine.core.errors import CoordinatorUnavailableError, WorkerFailedError
from engine.core.hosts.host_options import RegisteredHost
from engine.core.kv import Lease
from engine.runtime.agent import host_servers
from engine.runtime.agent.host_servers import HostServers
from engine.runtime.agent.remote_workers import RemoteSpawner
from engine.runtime.process.fork_client import ForkServer

MOST_S = 20.0


class SlowStore:
    """A store that is slow to revoke a lease, and fails the first time."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.answers = threading.Event()

    def revoke(self, lease: Lease) -> None:
        """Fails the first time; waits for `answers` the second time."""
        self.num_asked += 1
        if self.num_asked == 1:
            raise CoordinatorUnavailableError("no leader")
        assert self.answers.wait(MOST_S)


def until(is_so: Any) -> None:
    until_s = time.monotonic() + MOST_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_a_slow_store_holds_up_no_tick_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_servers, "TICK_S", 0.05)
    lost, living = (RemoteSpawner(RegisteredHost(name, name, "127.0.0.1", 7, {})) for name in ("lost", "living"))
    store = SlowStore()
    ticks: list[int] = []

    def ticked() -> None:
        living.peer.came()
        ticks.append(1)

    monkeypatch.setattr(living, "tick", ticked)
    for each in (lost, living):
        each.peer.came()
    servers = HostServers(ForkServer.__new__(ForkServer), [lost, living], store)  # type: ignore[arg-type]
    lost.peer.ended_ns = time.monotonic_ns()
    until(lambda: store.num_asked == 2)
    before = len(ticks)
    until(lambda: len(ticks) > before + 3)
    assert not lost.peer.is_lost, "its lease may be alive"
    store.answers.set()
    until(lambda: lost.peer.is_lost)
    servers.stop_watching()
    assert not living.peer.is_lost
    assert store.num_asked == 2


def test_new_workers_start_on_hosts_that_are_there_if_these_have_the_room() -> None:
    lost, gone, living = (RemoteSpawner(RegisteredHost(name, name, "127.0.0.1", 7, {})) for name in ("a", "b", "c"))
    local = ForkServer.__new__(ForkServer)
    local.host = "here"
    servers = HostServers(local, [lost, gone, living], SlowStore(), room=2)  # type: ignore[arg-type]
    servers.stop_watching()
    servers.deal(range(4))
    assert [*servers.dealt.values()] == ["here", "a", "b", "c"]
    lost.peer.is_lost, gone.has_left = True, True
    servers.deal(range(4))
    assert [*servers.dealt.values()] == ["here", "here", "c", "c"]
    del servers.dealt[3]
    assert servers.at(4) is living, "the fewest are there"
    with pytest.raises(
        WorkerFailedError, match="hosts a and b are lost, and hosts here and c have room for 4 workers, of 5"
    ):
        servers.deal(range(5))
