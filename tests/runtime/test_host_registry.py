"""The hosts of a run in both stores: names, the election, differences, hosts that are missing, the outcome."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from engine.core.errors import CoordinatorUnavailableError, EnvironmentLacksError, UserError
from engine.core.hosts.host_options import RegisteredHost
from engine.runtime.agent import host_registry
from engine.runtime.agent.host_registry import HostKeys, HostOutcome, HostRegistry, RunCertificate
from tests.runtime.kv_backends import Backend

MADE = RunCertificate("certificate", "key")
TTL_S = 60


def come(backend: Backend, name: str, incarnation: str = "", **facts: Any) -> HostRegistry:
    """Returns a host that has registered."""
    client = backend.client()
    lease = client.grant(TTL_S)
    own = RegisteredHost(name, incarnation or f"{name}1", "10.0.0.1", lease.lease_id, facts)
    made = HostRegistry(client, own, lease)
    made.register()
    return made


def test_the_hosts_come_in_their_order_and_one_is_elected(backend: Backend) -> None:
    b, a, c = come(backend, "b"), come(backend, "a"), come(backend, "c")
    hosts = a.gathered((), 2, 5.0)
    assert [each.name for each in hosts] == ["b", "a"]
    assert b.elect(hosts, "10.0.0.1:7", MADE)
    assert not a.elect(hosts, "10.0.0.2:7", MADE)
    found = a.elected()
    assert found is not None
    assert (found.name, found.place, found.hosts, found.made) == ("b", "10.0.0.1:7", ("b", "a"), MADE)
    with pytest.raises(CoordinatorUnavailableError, match=r"host b at 10.0.0.1:7 coordinates hosts b, a"):
        c.gathered((), 2, 5.0)


def test_who_has_begun_a_run_is_named_until_it_is_over(backend: Backend) -> None:
    a, b = come(backend, "a"), come(backend, "b")
    assert a.holder() == ""
    assert a.elect(a.gathered((), 2, 5.0), "10.0.0.1:7", MADE)
    backend.client().revoke(a._lease)
    assert b.elected() is None
    assert b.holder() == "host a at 10.0.0.1:7 coordinated hosts a, b"
    b.forget(())
    assert b.holder() == ""


def test_a_name_that_another_host_has_is_refused(backend: Backend) -> None:
    come(backend, "a")
    with pytest.raises(UserError, match="--node"):
        come(backend, "a", "a2")


def test_a_host_that_registers_again_is_itself(backend: Backend) -> None:
    a = come(backend, "a")
    a.register()
    assert [each.name for each in a.hosts()] == ["a"]


def test_missing_hosts_are_named(backend: Backend) -> None:
    a = come(backend, "a")
    with pytest.raises(EnvironmentLacksError, match=r"1 of 3 hosts registered within 0 s: a; missing: b, c"):
        a.gathered(("a", "b", "c"), 3, 0.0)
    with pytest.raises(EnvironmentLacksError, match=r"1 of 2 hosts registered within 0 s: a$"):
        a.gathered((), 2, 0.0)


def test_only_the_named_hosts_count(backend: Backend) -> None:
    come(backend, "x")
    a, _ = come(backend, "a"), come(backend, "b")
    assert [each.name for each in a.gathered(("b", "a"), 2, 5.0)] == ["a", "b"]


def test_hosts_that_do_not_agree_do_not_begin(backend: Backend) -> None:
    a, b = come(backend, "a", torch="2.13.0", stages=4), come(backend, "b", torch="2.12.0", stages=4)
    with pytest.raises(EnvironmentLacksError, match=r"^torch: '2.13.0' on host a, '2.12.0' on host b\n"):
        a.gathered((), 2, 5.0)
    backend.client().revoke(a._lease)  # a has left before b looks
    with pytest.raises(EnvironmentLacksError, match=r"^torch: '2.13.0' on host a, '2.12.0' on host b\n"):
        b.gathered((), 2, 60.0)
    again = come(backend, "a", "a2", torch="2.13.0", stages=4)
    with pytest.raises(EnvironmentLacksError, match="1 of 3 hosts registered"):  # which is a reason of its own
        again.gathered(("a", "x", "y"), 3, 0.0)


def test_the_election_is_over_when_the_lease_of_the_elected_host_is(backend: Backend) -> None:
    a, b = come(backend, "a"), come(backend, "b")
    hosts = a.gathered((), 2, 5.0)
    assert a.elect(hosts, "10.0.0.1:7", MADE)
    backend.client().revoke(a._lease)
    assert b.elected() is None
    assert [each.name for each in b.hosts()] == ["b"]


def test_a_host_that_comes_back_waits_for_the_outcome(backend: Backend) -> None:
    a, b = come(backend, "a"), come(backend, "b")
    hosts = a.gathered((), 2, 5.0)
    assert a.elect(hosts, "10.0.0.1:7", MADE)
    assert b.outlived() is None
    backend.client().revoke(b._lease)
    again = come(backend, "b", "b2")
    found = again.outlived()
    assert found is not None
    a.tell(HostOutcome(0, "finished"))
    assert again.awaited(found) == HostOutcome(0, "finished")


def test_a_host_that_comes_back_ends_with_the_host_that_coordinates(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_registry, "_ELECTION_S", 0.0)
    a, b = come(backend, "a"), come(backend, "b")
    assert a.elect(a.gathered((), 2, 5.0), "10.0.0.1:7", MADE)
    backend.client().revoke(b._lease)
    again = come(backend, "b", "b2")
    found = again.outlived()
    assert found is not None
    backend.client().revoke(a._lease)
    with pytest.raises(CoordinatorUnavailableError, match="host a"):
        again.awaited(found)


def test_the_outcome_stays_when_all_hosts_have_gone(backend: Backend) -> None:
    a = come(backend, "a")
    assert a.outcome() is None
    a.tell(HostOutcome(3, "failed: why"))
    backend.client().revoke(a._lease)
    late = HostRegistry(backend.client(), replace(a.own, incarnation="a2"), a._lease)
    assert late.outcome() == HostOutcome(3, "failed: why")
    assert late.hosts() == []


def test_another_host_succeeds_one_that_is_lost_and_only_one_does(backend: Backend) -> None:
    a, b, c = come(backend, "a"), come(backend, "b"), come(backend, "c")
    assert a.elect(a.gathered((), 3, 5.0), "10.0.0.1:7", MADE)
    before = b.elected()
    assert before is not None
    assert b.succeed(before, "10.0.0.2:7", 0) is None  # it is not lost
    b.revoke(before)
    c.revoke(before)  # each that sees the end does
    found = b.succeed(before, "10.0.0.2:7", 12)
    assert found is not None
    assert c.succeed(before, "10.0.0.3:7", 0) is None
    assert c.elected() == found
    assert (before.heard, found.heard) == (0, 12)
    assert (found.name, found.place, found.hosts, found.made) == ("b", "10.0.0.2:7", before.hosts, before.made)
    assert [(each.name, bool(each.lease_id)) for each in b.of_run(found)] == [("a", False), ("b", True), ("c", True)]


def test_no_host_succeeds_when_the_run_is_over(backend: Backend) -> None:
    a, b = come(backend, "a"), come(backend, "b")
    assert a.elect(a.gathered((), 2, 5.0), "10.0.0.1:7", MADE)
    before = b.elected()
    assert before is not None
    a.tell(HostOutcome(0, "finished"))
    b.revoke(before)
    assert b.succeed(before, "10.0.0.2:7", 0) is None


def test_who_waits_for_the_end_of_a_run_gets_its_outcome(backend: Backend) -> None:
    keys = HostKeys(backend.client())
    assert keys.end() is None  # nobody knows the run
    a = come(backend, "a")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(keys.end)
        a.elect(a.hosts(), "10.0.0.1:7", MADE)
        time.sleep(0.3)
        assert not waiting.done()
        a.tell(HostOutcome(3, "failed: why"))
        assert waiting.result(20) == HostOutcome(3, "failed: why")
    backend.client().revoke(a._lease)
    assert keys.end() == HostOutcome(3, "failed: why")  # it stays for an hour


def test_a_run_whose_hosts_are_gone_or_were_refused_has_an_end_too(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_registry, "_ELECTION_S", 0.3)
    keys, a = HostKeys(backend.client()), come(backend, "a", stages=4)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(keys.end)
        time.sleep(0.2)
        backend.client().revoke(a._lease)
        with pytest.raises(CoordinatorUnavailableError, match="no host of the run is left"):
            waiting.result(20)
    a, _ = come(backend, "a", stages=4), come(backend, "b", stages=5)
    with pytest.raises(EnvironmentLacksError):
        a.gathered((), 2, 5.0)
    found = keys.end()
    assert found is not None
    assert (found.code, found.words.partition("\n")[0]) == (4, "refused: stages: 4 on host a, 5 on host b")
