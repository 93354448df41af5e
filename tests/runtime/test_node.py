"""A host in the store, on both stores: what it writes of its workers, and what it does once it is out."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from engine.core.errors import CoordinatorUnavailableError
from engine.core.job.job import Job
from engine.core.kv import KV, Lease
from engine.core.messages import HeartbeatMessage, ReadyMessage
from engine.core.protocol.coordinator_state import CoordinatorState
from engine.core.protocol.coordinator_state import begin as begin_coordinator
from engine.core.protocol.events import Notice, WorkerWord
from engine.core.protocol.inputs_outputs import CoordinatorInput, ProcessExit
from engine.core.protocol.state import Options, begin
from engine.runtime.agent.coordinator import Node, join_store
from engine.runtime.store.election import LEASE_TTL_S, PRIVATE_TTL_S, RENEW_EVERY_NS
from engine.runtime.store.etcd_kv import DEADLINE_S
from tests.runtime.kv_backends import Backend

S = 1_000_000_000
NO_LINK: Any = None  # nobody is spoken to


def first_state(num_stages: int) -> CoordinatorState:
    """Returns the state of one stage on each worker; whoever owns the stage before is the shadow."""
    owners = tuple(range(num_stages))
    shadows = tuple(((each - 1) % num_stages,) for each in owners)
    first = begin(Options(stages=num_stages, redundant=True), owners, shadows, 9, 0)
    return begin_coordinator(Job(model="mlp", stages=num_stages), first, 0)


def start(client: KV, num_stages: int = 3, ttl_s: int = LEASE_TTL_S) -> Node:
    """Returns a node with its workers enrolled."""
    node = Node(client, first_state(num_stages), 0, ttl_s=ttl_s)
    for worker in range(num_stages):
        node.enrol(worker, 1000 + worker, ((0, worker),))
    return node


def tell(node: Node, inputs: Iterable[CoordinatorInput]) -> None:
    for each in inputs:
        node.handle(each)


def members_of(client: KV) -> dict[str, Any]:
    """Returns what is written of each worker."""
    return {item.key: json.loads(item.value) for item in client.read_prefix("members/").items}


def test_a_lease_outlasts_an_outage_that_a_call_outlasts() -> None:
    assert LEASE_TTL_S > DEADLINE_S + RENEW_EVERY_NS / S


def test_a_pause_of_the_whole_machine_costs_no_lease_in_a_private_store(tmp_path: Path) -> None:
    """Its etcd is paused too, and finds all that time gone when it goes on; a pause of a night is no reason to end."""
    with contextlib.ExitStack() as stack:
        node = join_store(stack, None, "r", tmp_path, first_state(3), MagicMock())
        assert node._lease.ttl_s == PRIVATE_TTL_S > 12 * 3600


def test_workers_are_written_down_with_their_slots_now_and_before(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    node = start(client)
    host = socket.gethostname()
    assert members_of(reader) == {
        f"members/{worker}": {"pid": 1000 + worker, "node": host, "now": [[0, worker]], "before": []}
        for worker in range(3)
    }
    tell(node, (WorkerWord(1, worker, ReadyMessage(), host) for worker in range(3)))
    tell(node, [ProcessExit(2, 1, -9)])
    node.delete_member_key(1)
    assert members_of(reader).keys() == {"members/0", "members/2"}
    node.report(2 * S)
    assert members_of(reader) == {
        "members/0": {"pid": 1000, "node": host, "now": [[0, 0], [0, 1]], "before": [[0, 0]]},
        "members/2": {"pid": 1002, "node": host, "now": [[0, 2]], "before": []},
    }


def test_striking_one_off_leaves_those_whose_number_begins_alike(backend: Backend) -> None:
    client = backend.client()
    node = start(client, 12)
    node.delete_member_key(1)
    assert members_of(client).keys() == {f"members/{worker}" for worker in range(12) if worker != 1}


def test_heartbeats_are_written_at_most_once_a_second(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    node = start(client)
    tell(node, (WorkerWord(S, worker, ReadyMessage(), "host") for worker in range(3)))
    tell(node, [WorkerWord(S * 3 // 2, 2, HeartbeatMessage(1, 0, 4, True))])
    node.report(2 * S)
    found = reader.get("heartbeats")
    assert found is not None and json.loads(found.value) == {"at_ns": 2 * S, "ages": {"0": 1.0, "1": 1.0, "2": 0.5}}
    node.report(2 * S + S // 2)
    again = reader.get("heartbeats")
    assert again == found


def test_a_second_coordinator_is_turned_away(backend: Backend) -> None:
    start(backend.client())
    with pytest.raises(CoordinatorUnavailableError, match="another coordinator holds this run"):
        Node(backend.client(), first_state(3), 0)


@pytest.mark.parametrize("act", ["renew", "report", "handle"])
def test_whoever_has_lost_its_lease_is_out_and_touches_nothing(backend: Backend, act: str) -> None:
    client, reader = backend.client(), backend.client()
    node = start(client, ttl_s=1)
    (held,) = reader.read_prefix("coordinator").items
    backend.outlast(Lease(held.lease_id, 1))
    backend.outlast(node._lease)
    assert not members_of(reader)
    reader.put("state", b"the next one's")
    acts = {
        "renew": lambda: node.renew(4 * S),
        "report": lambda: node.report(4 * S),
        "handle": lambda: node.handle(WorkerWord(1, 0, ReadyMessage(), "host")),
    }
    with pytest.raises(CoordinatorUnavailableError, match=r"has expired.*free some cores, and restart"):
        acts[act]()
    before = reader.read_prefix("").revision
    node.renew(40 * S)
    node.report(40 * S)
    node.delete_member_key(1)
    node.leave()
    assert reader.read_prefix("").revision == before
    found = reader.get("state")
    assert found is not None and found.value == b"the next one's"


def test_leaving_takes_every_key_along_and_its_leases(backend: Backend) -> None:
    client, other = backend.client(), backend.client(backend.root[:-1] + "-2/")
    other.put("state", b"of another run")
    node = start(client)
    tell(node, (WorkerWord(S, worker, ReadyMessage(), "host") for worker in range(3)))
    node.report(2 * S)
    lease = node._lease
    node.leave()
    assert [key for key in backend.all_keys() if key.startswith(backend.root)] == []
    assert f"{backend.root[:-1]}-2/state" in backend.all_keys()
    assert not client.keep_alive(lease)


def test_a_store_that_is_gone_is_asked_once(fragile: Backend) -> None:
    fragile.deadline_s = 0.3
    node = start(fragile.client())
    fragile.go_down()
    with pytest.raises(CoordinatorUnavailableError, match=r"does not answer|did not answer"):
        node.renew(4 * S)
    node.report(4 * S)
    node.delete_member_key(0)
    node.leave()


def test_of_several_hosts_the_next_one_goes_on_as_soon_as_the_lease_of_the_first_is_revoked(backend: Backend) -> None:
    """A thread keeps the lease: role, members and heartbeats hang on it, and the state outlives it."""
    client, other = backend.client(), backend.client()
    kept = client.grant(60)
    node = Node(client, first_state(3), 0, lease=kept)
    node.enrol(0, 1000, ((0, 0),))
    tell(node, (WorkerWord(S, worker, ReadyMessage(), "host") for worker in range(3)))
    assert {each.lease_id for each in other.read_prefix("").items if each.lease_id} == {kept.lease_id}
    with pytest.raises(CoordinatorUnavailableError, match="another coordinator holds this run"):
        Node(other, first_state(3), 0, lease=other.grant(60))
    node.leave()  # another host may have to finish the run
    other.revoke(kept)
    after = Node(other, first_state(3), 0, lease=other.grant(60))
    assert after.state.epoch == node.state.epoch == 1
    assert members_of(other) == {}
    with pytest.raises(CoordinatorUnavailableError, match="this coordinator was replaced"):
        tell(node, [Notice(2 * S, 0, S)])
