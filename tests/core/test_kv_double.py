"""The double beyond the contract that every store keeps: its clock, its faults, and who suffers them."""

from __future__ import annotations

import pytest

from engine.core.errors import CoordinatorUnavailableError, InvariantError
from engine.core.kv import KV, MAX_TXN_LENGTH, MAX_VALUE_BYTES, Lease, Put, Txn, absent
from tests.doubles.kv_double import Fault, StoreDouble
from tests.doubles.kv_double_client import ATTEMPTS, ClientDouble

ROOT = "/bamboo/run/"


@pytest.fixture
def store() -> StoreDouble:
    return StoreDouble()


@pytest.fixture
def kv(store: StoreDouble) -> KV:
    return ClientDouble(store, ROOT)


def test_a_lease_expires_at_its_time_and_not_before(store: StoreDouble, kv: KV) -> None:
    lease = kv.grant(2)
    kv.put("a", b"", lease)
    store.advance(1.5)
    assert kv.keep_alive(lease)
    store.advance(1.999)
    assert kv.get("a") is not None
    store.advance(0.001)
    assert kv.get("a") is None
    assert not kv.keep_alive(lease)


def test_leases_that_expire_on_the_way_do_so_in_order(store: StoreDouble, kv: KV) -> None:
    for name, ttl_s in (("slow", 3), ("quick", 1), ("lasting", 9)):
        kv.put(name, b"", kv.grant(ttl_s))
    ended: list[float] = []
    end_lease = store.end_lease
    store.end_lease = lambda lease_id: ended.append(store.now_s) or end_lease(lease_id)  # type: ignore[method-assign, func-returns-value]
    store.advance(5)
    assert ended == [1.0, 3.0]
    assert [item.key for item in kv.read_prefix("").items] == ["lasting"]


def test_time_stands_still_by_itself(store: StoreDouble, kv: KV) -> None:
    lease = kv.grant(1)
    for _ in range(100):
        kv.put("a", b"", lease)
    assert (store.now_s, kv.keep_alive(lease)) == (0.0, True)


def test_each_fault_strikes_one_call(store: StoreDouble, kv: KV) -> None:
    store.inject(Fault.LOSE_REQUEST)
    assert kv.put("a", b"") == 2
    store.inject(Fault.LOSE_REPLY)
    assert kv.put("a", b"") == 4  # written twice: a put that is repeated is for keys of one writer
    assert kv.put("a", b"") == 5


@pytest.mark.parametrize(("fault", "version"), [(Fault.LOSE_REQUEST, 0), (Fault.LOSE_REPLY, 1)])
def test_a_client_gives_up_and_the_next_try_reads_back(store: StoreDouble, kv: KV, fault: Fault, version: int) -> None:
    store.inject(fault, *[Fault.LOSE_REQUEST] * (ATTEMPTS - 1))
    with pytest.raises(CoordinatorUnavailableError):
        kv.transact(Txn((absent("a"),), (Put("a", b"1"),)))
    outcome = kv.transact(Txn((absent("a"),), (Put("a", b"2"),)))
    found = kv.get("a")
    assert found is not None
    assert (outcome.succeeded, found.value, found.version) == (not version, b"1" if version else b"2", 1)


def test_while_the_store_is_down_leases_go_on_expiring(store: StoreDouble, kv: KV) -> None:
    lease = kv.grant(5)
    store.go_down()
    with pytest.raises(CoordinatorUnavailableError):
        kv.get("a")
    store.advance(6)
    store.come_back()
    assert not kv.keep_alive(lease)


def test_clients_share_the_store_each_under_its_root(store: StoreDouble, kv: KV) -> None:
    same, other = ClientDouble(store, ROOT), ClientDouble(store, "/bamboo/other/")
    kv.put("a", b"1")
    assert same.get("a") == kv.get("a")
    assert other.get("a") is None


def test_what_etcd_would_refuse_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="at most"):
        Put("a", bytes(MAX_VALUE_BYTES + 1))
    with pytest.raises(InvariantError, match="too long"):
        Txn(tuple(absent(str(number)) for number in range(MAX_TXN_LENGTH + 1)), ())
    with pytest.raises(InvariantError, match="twice"):
        Txn((), (Put("a", b""), Put("a", b"", Lease(1, 1))))
