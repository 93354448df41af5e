"""The servers of other hosts after a take-over: what they tell to the next coordinator, and what it tells to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.core.config.job import Job
from engine.core.errors import InvariantError
from engine.core.history.record_lines import encoded
from engine.core.history.run_records import HeirsRecord
from engine.core.hosts.host_messages import HeardHostMessage, HoldsHostMessage, SaidAllHostMessage, ToldHostMessage
from engine.core.hosts.host_messages import read_frame as read
from engine.core.hosts.registered_host import RegisteredHost
from engine.runtime.hosts import heard_results
from engine.runtime.hosts.away_server import AwayServer
from engine.runtime.hosts.heard_results import HeardResults
from engine.runtime.hosts.host_servers import HostServers
from tests.doubles.kv_double import StoreDouble
from tests.doubles.kv_double_client import ClientDouble

LINES = [encoded(HeirsRecord(epoch=epoch, owners=(0,), shadows=())) for epoch in range(4)]


def away(name: str) -> AwayServer:
    return AwayServer(RegisteredHost(name, "1f", "127.0.0.1", 0, {}), takes_over=True)


def kept(server: AwayServer) -> list[tuple[int, str]]:
    """Returns the decisions that wait for a host, each with its number."""
    frames = map(read, server.peer.end._unheard)
    return [(header.number, line.decode()) for header, line in frames if isinstance(header, HeardHostMessage)]


@pytest.fixture(name="servers")
def _servers() -> Iterator[HostServers]:
    hosts = [away(name) for name in "abc"]
    for number, each in enumerate(hosts):
        each._deliver(HoldsHostMessage((), number + 1), b"")
    made = HostServers(hosts[0], hosts, {}, ClientDouble(StoreDouble(), "/r/"))
    yield made
    made.stop_watching()


def test_a_host_tells_what_it_was_told_until_it_has_said_all() -> None:
    host = away("a")
    host._deliver(HoldsHostMessage(((1, 0, 70),), 2), b"")
    host._deliver(ToldHostMessage(1), LINES[1].encode())
    with pytest.raises(InvariantError):
        host._deliver(ToldHostMessage(2), b"{}")
    host._deliver(SaidAllHostMessage(), b"")
    host._deliver(ToldHostMessage(2), LINES[2].encode())
    assert (host.heard, host.told, host.held) == (2, {1: LINES[1]}, ((1, 0, 70),))


def test_each_other_host_is_told_what_it_lacks_before_any_new_decision(servers: HostServers) -> None:
    heard = HeardResults(Job())
    for number, line in enumerate(LINES[:3]):
        heard.take(number, line)
    servers.go_on_after(heard)
    servers.hear(HeirsRecord(epoch=3, owners=(0,), shadows=()), LINES[3])
    own, b, c = servers._away.values()
    assert kept(own) == []
    assert kept(b) == [(2, LINES[2]), (3, LINES[3])]
    assert kept(c) == [(3, LINES[3])]


def test_a_host_that_lacks_more_than_is_kept_is_lost(servers: HostServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heard_results, "MOST_WAITING_BYTES", len(LINES[0]))
    heard = HeardResults(Job())
    for number, line in enumerate(LINES):
        heard.take(number, line)
    servers.go_on_after(heard)
    _, b, c = servers._away.values()
    assert (b.peer.is_lost, c.peer.is_lost) == (True, False)
    assert kept(c) == [(3, LINES[3])]
