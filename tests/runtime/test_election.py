"""Elections on both stores: one holder at a time, a successor at once, and a fence that a late holder cannot pass."""

from __future__ import annotations

from engine.core.kv import Lease, Put, Txn
from engine.runtime.store.election import Election
from tests.runtime.kv_backends import Backend

KEY = "coordinator"


def candidates(backend: Backend, count: int, ttl_s: int = 60) -> list[Election]:
    """Returns candidates with clients of their own."""
    return [Election(backend.client(), KEY, f"c{number}".encode(), ttl_s) for number in range(count)]


def test_one_holds_and_the_others_wait_without_a_lease(backend: Backend) -> None:
    first, second, third = candidates(backend, 3)
    assert [each.poll() for each in (first, second, third)] == [True, False, False]
    assert [each.poll() for each in (first, second, third)] == [True, False, False]
    assert first.renew()


def test_when_the_holder_resigns_one_of_the_others_takes_over(backend: Backend) -> None:
    first, *others = candidates(backend, 3)
    assert first.poll() and not any(each.poll() for each in others)
    first.resign()
    assert [each.poll() for each in others] == [True, False]
    others[1].resign()
    assert others[0].renew()


def test_a_loser_leaves_no_lease_and_a_key_with_a_longer_name_is_another(backend: Backend) -> None:
    client = backend.client()
    client.put(KEY + "-2", b"")
    granted: list[Lease] = []
    grant, transact = client.grant, client.transact

    def overtaken(txn: Txn) -> object:
        backend.client().put(KEY, b"quicker")
        return transact(txn)

    client.grant = lambda ttl_s: granted.append(grant(ttl_s)) or granted[-1]  # type: ignore[method-assign, func-returns-value]
    client.transact = overtaken  # type: ignore[method-assign, assignment]
    assert not Election(client, KEY, b"slower", 60).poll()
    assert len(granted) == 1 and not client.keep_alive(granted[0])


def test_who_does_not_renew_is_followed_and_can_write_no_more(backend: Backend) -> None:
    late, next_one = candidates(backend, 2, ttl_s=1)
    client = backend.client()
    assert late.poll() and not next_one.poll()
    assert client.transact(Txn((late.fence,), (Put("epoch", b"1"),))).succeeded
    found = client.get(KEY)
    assert found is not None
    backend.outlast(Lease(found.lease_id, 1))
    assert late.poll()  # it does not know yet
    assert next_one.poll()
    assert client.transact(Txn((next_one.fence,), (Put("epoch", b"2"),))).succeeded
    assert not client.transact(Txn((late.fence,), (Put("epoch", b"1"),))).succeeded
    assert not late.renew()
    assert not late.poll()
    late.resign()


def test_a_late_holder_of_a_kept_lease_takes_nothing_from_its_successor(backend: Backend) -> None:
    client = backend.client()
    lease = client.grant(60)
    late, (next_one,) = Election(client, KEY, b"late", 60, lease), candidates(backend, 1)
    assert late.poll() and not next_one.poll()
    client.revoke(lease)
    assert next_one.poll()
    late.resign()
    found = client.get(KEY)
    assert found is not None and found.value == b"c0"


def test_a_kept_lease_outlives_the_key(backend: Backend) -> None:
    client = backend.client()
    lease = client.grant(60)
    first, (next_one,) = Election(client, KEY, b"first", 60, lease), candidates(backend, 1)
    assert first.poll()
    first.resign()
    assert client.keep_alive(lease)
    assert next_one.poll()


def test_a_lease_that_expires_before_the_key_is_taken_is_another_try(backend: Backend) -> None:
    client = backend.client()
    grant = client.grant

    def spoilt(ttl_s: int) -> Lease:
        lease = grant(ttl_s)
        client.revoke(lease)
        client.grant = grant  # type: ignore[method-assign]
        return lease

    client.grant = spoilt  # type: ignore[method-assign]
    election = Election(client, KEY, b"me", 60)
    assert [election.poll(), election.poll()] == [False, True]
