"""The interface of the coordinator's store: keys with revisions, transactions and leases.

The store on etcd and the test double implement it; the same tests run on both. Rules: every key is relative to the root
of its `KV`, which can touch nothing outside of the root. The store has one revision; each transaction raises it by one,
and all changes of a transaction share it. Every call returns within a deadline or raises CoordinatorUnavailableError.
Reads are linearizable: they see every change that was acknowledged before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.core.errors import ensure

# etcd's limits are 1.5 MiB and 128 operations per request; the difference is for additions of the back end.
MAX_VALUE_BYTES = 1 << 20
MAX_TXN_LENGTH = 120


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it stood at some revision; `version` counts its puts since it was created, from 1."""

    key: str
    value: bytes
    create_revision: int
    revision: int
    version: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """All keys under a prefix, in order, at one `revision`."""

    items: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease: its keys are deleted if `keep_alive` is not called for `ttl_s` seconds."""

    lease_id: int
    ttl_s: int


@dataclass(frozen=True, slots=True)
class Condition:
    """A precondition of a transaction on one key: it holds exactly `value` (None: it does not exist)."""

    key: str
    value: bytes | None

    def holds(self, entry: KeyValue | None) -> bool:
        """Returns whether `entry`, the content of the key (None: absent), meets this condition."""
        return self.value == (None if entry is None else entry.value)


def absent(key: str) -> Condition:
    """Returns the condition that `key` does not exist."""
    return Condition(key, None)


def equal(key: str, value: bytes) -> Condition:
    """Returns the condition that `key` holds exactly `value`."""
    return Condition(key, value)


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a key; without a lease the key stays until it is deleted."""

    key: str
    value: bytes
    lease: Lease | None = None

    def __post_init__(self) -> None:
        size = len(self.value)
        ensure(size <= MAX_VALUE_BYTES, f"the value of {self.key!r} has {size} bytes, at most {MAX_VALUE_BYTES}")


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a key if it exists."""

    key: str


Change = Put | Delete


@dataclass(frozen=True, slots=True)
class Txn:
    """A transaction: if all conditions hold, it makes all changes atomically. It changes a key at most once."""

    conditions: tuple[Condition, ...]
    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        ensure(max(len(self.conditions), len(self.changes)) <= MAX_TXN_LENGTH, "transaction too long")
        ensure(len({change.key for change in self.changes}) == len(self.changes), "a key is changed twice")


@dataclass(frozen=True, slots=True)
class TxnOutcome:
    """The outcome of a transaction.

    If it succeeded, `revision` is the revision of its changes. If not, `found` has the key of each condition at
    `revision` (None: absent).
    """

    succeeded: bool
    revision: int
    found: tuple[KeyValue | None, ...] = ()


def settled(txn: Txn, outcome: TxnOutcome) -> TxnOutcome:
    """Returns the outcome of a transaction that was sent again because a reply was lost, after reading its keys back.

    An earlier attempt was applied if the conditions fail now and a key of a condition holds the value that `txn` puts.
    """
    puts = {change.key: change for change in txn.changes if isinstance(change, Put)}
    for entry in outcome.found:
        put = None if entry is None else puts.get(entry.key)
        if entry is not None and put is not None:
            lease_id = put.lease.lease_id if put.lease else 0
            if (entry.value, entry.lease_id) == (put.value, lease_id):
                return TxnOutcome(True, entry.revision)
    return outcome


class KV(Protocol):
    """One client of the store."""

    def get(self, key: str) -> KeyValue | None:
        """Returns the content of `key`, or None if it does not exist."""
        ...

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Writes a key that has no other writer, and returns the revision; after a lost reply it writes again.

        Raises LeaseLostError if the lease has expired.
        """
        ...

    def transact(self, txn: Txn) -> TxnOutcome:
        """Runs a transaction and returns its outcome; sends it again if a reply is lost.

        It is applied at most once if it puts a key of its conditions, with a value that the key never had and that no
        other client puts. Other transactions must be idempotent.

        Raises LeaseLostError, with nothing changed, if a put names a lease that has expired.
        """
        ...

    def read_prefix(self, prefix: str) -> StoreSnapshot:
        """Returns all keys that start with `prefix` at one revision; an empty prefix is the whole root."""
        ...

    def delete_prefix(self, prefix: str) -> None:
        """Deletes all keys that start with `prefix`, atomically."""
        ...

    def grant(self, ttl_s: int) -> Lease:
        """Makes a lease of `ttl_s` whole seconds."""
        ...

    def keep_alive(self, lease: Lease) -> bool:
        """Renews a lease; returns False if it has expired and its holder is therefore fenced."""
        ...

    def revoke(self, lease: Lease) -> None:
        """Ends a lease and deletes its keys."""
        ...

    def close(self) -> None:
        """Disconnects."""
        ...
