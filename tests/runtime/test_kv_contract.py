"""What every store of the coordinator does, held to the double and to a real etcd alike."""

from __future__ import annotations

import itertools

import pytest

from engine.core.errors import CoordinatorUnavailableError, LeaseLostError
from engine.core.kv import KV, Condition, Delete, Put, Txn, absent, equal
from tests.doubles.kv_double import Fault
from tests.runtime.kv_backends import Backend

LOSE_REQUEST, LOSE_REPLY = Fault.LOSE_REQUEST, Fault.LOSE_REPLY


@pytest.fixture
def kv(backend: Backend) -> KV:
    """One client."""
    return backend.client()


def put(key: str, value: bytes = b"") -> Txn:
    """A transaction without conditions."""
    return Txn((), (Put(key, value),))


def test_a_key_has_the_revisions_of_its_first_and_last_put(kv: KV) -> None:
    assert kv.get("a") is None
    first = kv.put("a", b"1")
    last = kv.put("a", b"2")
    found = kv.get("a")
    assert found is not None
    assert (found.key, found.value, found.version, found.lease_id) == ("a", b"2", 2, 0)
    assert (found.create_revision, found.revision) == (first, last)
    assert last == first + 1


def test_a_key_that_comes_back_is_a_new_one(kv: KV) -> None:
    kv.put("a", b"1")
    kv.transact(Txn((), (Delete("a"),)))
    again = kv.put("a", b"2")
    found = kv.get("a")
    assert found is not None
    assert (found.create_revision, found.version) == (again, 1)


@pytest.mark.parametrize(
    ("condition", "held", "holds"),
    [
        (absent("a"), None, True),
        (absent("a"), b"1", False),
        (equal("a", b"1"), b"1", True),
        (equal("a", b"1"), b"2", False),
        (equal("a", b""), None, False),
        (equal("a", b""), b"", True),
    ],
)
def test_a_condition_decides(kv: KV, condition: Condition, held: bytes | None, holds: bool) -> None:
    if held is not None:
        kv.put("a", held)
    outcome = kv.transact(Txn((equal("b", b""), condition), (Put("c", b"done"),)))
    assert not outcome.succeeded
    kv.put("b", b"")
    outcome = kv.transact(Txn((equal("b", b""), condition), (Put("c", b"done"),)))
    assert outcome.succeeded == holds
    assert (kv.get("c") is not None) == holds
    assert outcome.found == (() if holds else (kv.get("b"), kv.get("a")))


def test_changes_of_a_transaction_share_its_revision(kv: KV) -> None:
    before = kv.put("b", b"0")
    outcome = kv.transact(Txn((), (Put("a", b"1"), Delete("b"), Delete("never"), Put("c", b"3"))))
    assert outcome.succeeded and outcome.revision > before
    items = kv.read_prefix("").items
    assert [(item.key, item.revision) for item in items] == [("a", outcome.revision), ("c", outcome.revision)]


def test_a_transaction_that_fails_changes_nothing(kv: KV) -> None:
    before = kv.put("a", b"1")
    outcome = kv.transact(Txn((absent("a"),), (Put("a", b"2"), Put("b", b""))))
    assert (outcome.succeeded, outcome.revision) == (False, before)
    assert kv.read_prefix("").revision == before
    assert [item.value for item in kv.read_prefix("").items] == [b"1"]


def test_a_prefix_is_read_whole_in_order_and_at_one_revision(kv: KV) -> None:
    keys = [f"m/{number:03}" for number in range(50)]
    for key in reversed(keys):
        revision = kv.put(key, key.encode())
    kv.put("m", b"")
    revision = kv.put("n/1", b"")
    snapshot = kv.read_prefix("m/")
    assert [(item.key, item.value) for item in snapshot.items] == [(key, key.encode()) for key in keys]
    assert snapshot.revision == revision
    assert len(kv.read_prefix("").items) == 52


def test_deleting_a_prefix_takes_that_and_nothing_else(backend: Backend, kv: KV) -> None:
    neighbours = [backend.client(backend.root[:-1] + suffix) for suffix in ("0/", "-/")]
    for each in (kv, *neighbours):
        each.put("m/1", b"")
        each.put("n/1", b"")
    kv.delete_prefix("m/")
    assert [item.key for item in kv.read_prefix("").items] == ["n/1"]
    kv.delete_prefix("")
    assert kv.read_prefix("").items == ()
    for each in neighbours:
        assert [item.key for item in each.read_prefix("").items] == ["m/1", "n/1"]


def test_a_client_leaves_nothing_of_its_own(backend: Backend) -> None:
    client = backend.new_client(backend.root)
    client.transact(put("a"))
    client.put("b", b"")
    client.close()
    assert {key for key in backend.all_keys() if key.startswith(backend.root)} == {
        f"{backend.root}a",
        f"{backend.root}b",
    }


def test_many_transactions_leave_no_more_keys_than_one(backend: Backend, kv: KV) -> None:
    kv.transact(put("a"))
    before = backend.all_keys()
    for number in range(100):
        kv.transact(put("a", str(number).encode()))
    assert backend.all_keys() == before


def test_transactions_go_on_after_everything_was_deleted(backend: Backend, kv: KV) -> None:
    other = backend.client()
    for _ in range(2):
        assert kv.transact(put("a")).succeeded and other.transact(put("b")).succeeded
        kv.delete_prefix("")


def test_a_key_that_is_no_text_does_no_harm(backend: Backend, kv: KV) -> None:
    backend.write_foreign(backend.root.encode() + b"m/\xff\x00", b"\xfe")
    (item,) = kv.read_prefix("m/").items
    assert (item.key, item.value) == ("m/\udcff\x00", b"\xfe")
    assert kv.get(item.key) == item


def test_a_lease_that_expires_takes_its_keys_along(backend: Backend, kv: KV) -> None:
    lease = kv.grant(1)
    kv.put("m/1", b"", lease)
    kv.transact(Txn((), (Put("m/2", b"", lease), Put("m/3", b""))))
    kv.put("m/4", b"", lease)
    kv.put("m/4", b"")  # without a lease it stays
    assert kv.keep_alive(lease)
    backend.outlast(lease)
    assert [item.key for item in kv.read_prefix("m/").items] == ["m/3", "m/4"]
    assert not kv.keep_alive(lease)
    with pytest.raises(LeaseLostError):
        kv.put("m/1", b"", lease)
    with pytest.raises(LeaseLostError):
        kv.transact(Txn((), (Put("m/0", b""), Put("m/1", b"", lease))))
    assert kv.get("m/0") is None
    assert kv.transact(put("m/0")).succeeded
    kv.revoke(lease)


def test_a_lease_that_is_revoked_is_gone_at_once(kv: KV) -> None:
    lease = kv.grant(60)
    kv.put("a", b"", lease)
    found = kv.get("a")
    assert found is not None and found.lease_id == lease.lease_id != 0
    kv.revoke(lease)
    assert kv.get("a") is None
    assert not kv.keep_alive(lease)


FAULTS = [faults for length in (1, 2, 3) for faults in itertools.product((LOSE_REQUEST, LOSE_REPLY), repeat=length)]


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: "-".join(fault.name.split("_")[1] for fault in faults))
def test_a_transaction_is_applied_once_whatever_is_lost(backend: Backend, faults: tuple[Fault, ...]) -> None:
    client, other = backend.client(), backend.client()
    for number in range(2):
        backend.lose(client, *faults)
        condition = equal("count", str(number - 1).encode()) if number else absent("count")
        outcome = client.transact(Txn((condition,), (Put("count", str(number).encode()), Put(f"at/{number}", b""))))
        found = other.get("count")
        assert found is not None
        assert (outcome.succeeded, found.version) == (True, number + 1)
        assert outcome.revision == found.revision


@pytest.mark.parametrize("fault", [LOSE_REQUEST, LOSE_REPLY])
def test_a_transaction_that_must_fail_does_so_when_its_reply_is_lost(backend: Backend, kv: KV, fault: Fault) -> None:
    kv.put("a", b"other")
    backend.lose(kv, fault)
    outcome = kv.transact(Txn((absent("a"),), (Put("a", b"mine"),)))
    assert not outcome.succeeded
    assert outcome.found == (kv.get("a"),)


@pytest.mark.parametrize("fault", [LOSE_REQUEST, LOSE_REPLY])
def test_other_calls_are_repeated(backend: Backend, kv: KV, fault: Fault) -> None:
    for call in (
        lambda: kv.put("a", b"1"),
        lambda: kv.get("a"),
        lambda: kv.read_prefix(""),
        lambda: kv.keep_alive(kv.grant(60)),
        lambda: kv.revoke(kv.grant(60)),
    ):
        backend.lose(kv, fault)
        call()
    backend.lose(kv, fault)
    kv.delete_prefix("")
    assert kv.read_prefix("").items == ()


def test_the_fate_of_a_transaction_in_doubt_decides_the_next(fragile: Backend) -> None:
    fragile.deadline_s = 0.3
    kv = fragile.client()
    kv.transact(put("a", b"0"))
    fragile.lose(kv, LOSE_REPLY)
    fragile.go_down()
    with pytest.raises(CoordinatorUnavailableError):
        kv.transact(Txn((equal("a", b"0"),), (Put("a", b"1"),)))
    fragile.come_back()
    outcome = kv.transact(Txn((equal("a", b"0"),), (Put("a", b"2"),)))
    found = kv.get("a")
    assert found is not None
    assert outcome.succeeded == (found.value == b"2")


def test_calls_end_when_nobody_answers_and_work_again_afterwards(fragile: Backend) -> None:
    fragile.deadline_s = 0.3
    kv = fragile.client()
    lease = kv.grant(60)
    kv.put("a", b"")
    fragile.go_down()
    for call in (
        lambda: kv.get("a"),
        lambda: kv.put("a", b""),
        lambda: kv.transact(put("a")),
        lambda: kv.read_prefix(""),
        lambda: kv.delete_prefix(""),
        lambda: kv.grant(1),
        lambda: kv.keep_alive(lease),
    ):
        with pytest.raises(CoordinatorUnavailableError):
            call()
    fragile.come_back()
    assert kv.get("a") is not None
    assert kv.keep_alive(lease)
    assert kv.transact(put("a")).succeeded
