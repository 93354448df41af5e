"""The coordinator's store as the rest of bamboo sees it: keys with revisions, transactions, leases and watches.

Rules: only types stand here; the store on etcd and the double keep them, and one suite of tests holds both to them.
A `KV` is rooted: every key is relative to its root, so nothing outside of it can be touched. The store has one
revision, which each change raises by one; all changes of a transaction share a revision. Every call ends within a
deadline, with an answer or with CoordinatorUnavailableError. Reads see every change that was answered before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

# etcd takes requests of up to 1.5 MiB and up to 128 operations; the rest is room for what a back end adds.
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
class Snapshot:
    """All keys under a prefix, in order, as they stood together at `revision`: a watch goes on from the next one."""

    items: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A promise to call `keep_alive` within `ttl_s` seconds, or lose every key that hangs on it."""

    lease_id: int
    ttl_s: int


class Demand(Enum):
    """What a condition asks of its key."""

    ABSENT = "absent"
    PRESENT = "present"
    EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class Condition:
    """What must hold of one key for a transaction to change anything."""

    key: str
    demand: Demand
    value: bytes = b""

    def holds(self, found: KeyValue | None) -> bool:
        """Returns whether `found`, what the key holds, is what this condition asks for."""
        if self.demand is Demand.EQUAL:
            return found is not None and found.value == self.value
        return (found is None) == (self.demand is Demand.ABSENT)


def absent(key: str) -> Condition:
    """Returns the condition that `key` does not exist."""
    return Condition(key, Demand.ABSENT)


def present(key: str) -> Condition:
    """Returns the condition that `key` exists."""
    return Condition(key, Demand.PRESENT)


def equal(key: str, value: bytes) -> Condition:
    """Returns the condition that `key` holds exactly `value`."""
    return Condition(key, Demand.EQUAL, value)


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a key; without a lease the key stays until it is deleted."""

    key: str
    value: bytes
    lease: Lease | None = None

    def __post_init__(self) -> None:
        size = len(self.value)
        assert size <= MAX_VALUE_BYTES, f"the value of {self.key!r} has {size} bytes, at most {MAX_VALUE_BYTES}"


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a key; nothing happens if it does not exist."""

    key: str


Change = Put | Delete


@dataclass(frozen=True, slots=True)
class Txn:
    """If all conditions hold, make all changes at once; a key is changed at most once."""

    conditions: tuple[Condition, ...]
    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        assert max(len(self.conditions), len(self.changes)) <= MAX_TXN_LENGTH, "transaction too long"
        assert len({change.key for change in self.changes}) == len(self.changes), "a key is changed twice"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a transaction.

    If it succeeded, `revision` is that of its changes. If not, `found` is what the key of each condition held
    (None: absent) at `revision`.
    """

    succeeded: bool
    revision: int
    found: tuple[KeyValue | None, ...] = ()


class EventKind(Enum):
    """What a watch reports. GAP: changes up to the event's revision may be missing; read the prefix again."""

    PUT = "put"
    DELETE = "delete"
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change of one key, at `revision`; of a GAP, `key` is the prefix that is watched."""

    kind: EventKind
    key: str
    revision: int
    value: bytes = b""


class Watch(Protocol):
    """The changes under a prefix, each once and in the order in which they were made, however often the link breaks.

    After a GAP, changes later than its revision follow. Whoever reads the prefix again, at some revision, then drops
    the events up to that one.
    """

    def take(self) -> Sequence[WatchEvent]:
        """Returns what has arrived, without waiting.

        Raises CoordinatorUnavailableError when the link could not be mended within the deadline.
        """
        ...

    def close(self) -> None:
        """Ends the watch."""
        ...


class KV(Protocol):
    """One client of the store."""

    def get(self, key: str) -> KeyValue | None:
        """Returns what `key` holds."""
        ...

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Writes a key that has no other writer, and returns the revision; a lost reply means it is written again.

        Raises LeaseLostError when the lease has expired.
        """
        ...

    def transact(self, txn: Txn) -> Outcome:
        """Runs a transaction exactly once; what a lost reply said is found out.

        Raises LeaseLostError when a put names a lease that has expired; nothing was changed.
        """
        ...

    def read_prefix(self, prefix: str) -> Snapshot:
        """Returns all keys that start with `prefix`, as they stood together; an empty prefix is the whole root."""
        ...

    def delete_prefix(self, prefix: str) -> None:
        """Deletes all keys that start with `prefix`, at once."""
        ...

    def grant(self, ttl_s: int) -> Lease:
        """Makes a lease of `ttl_s` whole seconds."""
        ...

    def keep_alive(self, lease: Lease) -> bool:
        """Renews a lease; False means that it has expired: its holder is out, whatever it believes."""
        ...

    def revoke(self, lease: Lease) -> None:
        """Ends a lease and deletes its keys."""
        ...

    def watch(self, prefix: str, from_revision: int) -> Watch:
        """Watches the changes from `from_revision` (>= 1) on, past ones included."""
        ...

    def close(self) -> None:
        """Takes back what the client itself has put into the store, and ends it."""
        ...
