"""The servers of other hosts after a take-over: what they tell to the next coordinator, and what it tells to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.codec.messages import encode
from engine.codec.records import encoded
from engine.core.errors import InvariantError, WorkerFailedError
from engine.core.history.run_records import HeirsRecord
from engine.core.hosts.host_messages import (
    DecisionHostMessage,
    LeavesHostMessage,
    PastControlHostMessage,
    PastDecisionHostMessage,
    ProcessesHostMessage,
    ResendDoneHostMessage,
    SignalHostMessage,
)
from engine.core.hosts.host_options import RegisteredHost
from engine.core.job.job import Job
from engine.core.messages import PartitionMessage
from engine.runtime.agent import host_servers as heard_results
from engine.runtime.agent.frames import read_frame as read
from engine.runtime.agent.host_servers import HostServers, ReplicatedResults
from engine.runtime.agent.remote_workers import RemoteSpawner
from engine.runtime.process.progress_board import ProgressBoard
from tests.doubles.kv_double import StoreDouble
from tests.doubles.kv_double_client import ClientDouble

LINES = [encoded(HeirsRecord(epoch=epoch, owners=(0,), shadows=())) for epoch in range(4)]


def away(name: str) -> RemoteSpawner:
    return RemoteSpawner(RegisteredHost(name, "1f", "127.0.0.1", 0, {}), takes_over=True)


def kept(server: RemoteSpawner) -> list[tuple[int, str]]:
    """Returns the decisions that wait for a host, each with its number."""
    frames = map(read, server.peer.end._unheard)
    return [(header.number, line.decode()) for header, line in frames if isinstance(header, DecisionHostMessage)]


@pytest.fixture(name="servers")
def _servers() -> Iterator[HostServers]:
    hosts = [away(name) for name in "abc"]
    for number, each in enumerate(hosts):
        each._deliver(ProcessesHostMessage((), number + 1), b"")
    made = HostServers(hosts[0], hosts, ClientDouble(StoreDouble(), "/r/"))
    yield made
    made.stop_watching()


def test_a_host_tells_what_it_was_told_until_it_has_said_all() -> None:
    host = away("a")
    host._deliver(ProcessesHostMessage(((1, 0, 70),), 2), b"")
    host._deliver(PastDecisionHostMessage(1), LINES[1].encode())
    with pytest.raises(InvariantError):
        host._deliver(PastDecisionHostMessage(2), b"{}")
    host._deliver(PastControlHostMessage(), encode(PartitionMessage((0, 1))))
    host._deliver(ResendDoneHostMessage(), b"")
    host._deliver(PastDecisionHostMessage(2), LINES[2].encode())
    host._deliver(PastControlHostMessage(), encode(PartitionMessage((0, 2))))
    assert host.past_orders == [PartitionMessage((0, 1))]
    assert (host.num_decisions, host.past_decisions, host.inherited) == (2, {1: LINES[1]}, ((1, 0, 70),))


def test_each_other_host_is_told_what_it_lacks_before_any_new_decision(servers: HostServers) -> None:
    heard = ReplicatedResults(Job())
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
    heard = ReplicatedResults(Job())
    for number, line in enumerate(LINES):
        heard.take(number, line)
    servers.go_on_after(heard)
    _, b, c = servers._away.values()
    assert (b.peer.is_lost, c.peer.is_lost) == (True, False)
    assert kept(c) == [(3, LINES[3])]


def test_workers_that_begin_again_are_dealt_to_the_hosts_that_are_left(servers: HostServers) -> None:
    servers.deal(range(6))
    assert [servers.at(worker).host for worker in range(6)] == ["a", "a", "b", "b", "c", "c"]
    servers.lose("b", "why")
    servers.deal(range(6))
    assert [servers.at(worker).host for worker in range(6)] == ["a", "a", "a", "c", "c", "c"]
    assert servers.at(6).host == "a"
    servers._away["c"]._deliver(LeavesHostMessage(), b"")
    servers.deal(range(2))
    assert [servers.at(worker).host for worker in range(3)] == ["a", "a", "a"]


def test_hosts_that_lack_room_for_all_workers_are_told_with_the_lost_one() -> None:
    hosts = [away(name) for name in "abc"]
    servers = HostServers(hosts[0], hosts, ClientDouble(StoreDouble(), "/r/"), 2)
    servers.deal(range(6))
    servers.lose("c", "why")
    with pytest.raises(WorkerFailedError, match="host c is lost, and hosts a and b have room for 4 workers, of 5"):
        servers.deal(range(5))
    servers.deal(range(4))
    servers.stop_watching()


def test_the_process_of_a_lost_host_has_ended_with_it(servers: HostServers) -> None:
    """Then all workers begin again; an error would end the run, with the code of a host that lacks something."""
    servers.lose("b", "its stream has ended")
    board = ProgressBoard.create(2)
    child, _ = servers._away["b"].start_worker(1, Path("log"), [], board)
    assert (child.wait(), child.lost) == (-9, "its stream has ended")
    assert servers._away["b"].mailbox.take() == [(child, -9)]
    board.close()


def test_processes_of_another_coordinator_are_ended_when_all_workers_begin_again() -> None:
    host = away("a")
    host._deliver(ProcessesHostMessage(((1, 0, 70), (4, 2, 71)), 0), b"")
    host.end_held()
    sent = [header for header, _ in map(read, host.peer.end._unheard)]
    assert sent == [SignalHostMessage(1, 0), SignalHostMessage(4, 0)]
    assert host._number == 4, "numbers are not used again"
