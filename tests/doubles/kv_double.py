"""The double of the coordinator's store: in memory, with faults to order and a clock that only the test moves.

Rules: nothing happens by itself. Leases expire when the test advances the time; a fault strikes the call for which the
test has ordered it. All clients of one double see one store, each under its own root.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from engine.core.errors import LeaseLostError
from engine.core.kv import Change, Condition, KeyValue, Lease, Put, Txn, TxnOutcome

Reply = TypeVar("Reply")


class Fault(Enum):
    """What may befall one call: the request is lost, or the reply of a request that was carried out."""

    LOSE_REQUEST = "lose request"
    LOSE_REPLY = "lose reply"


class LostError(Exception):
    """A call has no answer."""


@dataclass(slots=True)
class _Granted:
    ttl_s: int
    expires_s: float


class StoreDouble:
    """The store, with absolute keys; `revision` counts from 1, as etcd's does."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.revision = 1
        self.items: dict[str, KeyValue] = {}
        self.down_since_s: float | None = None
        self._faults: deque[Fault] = deque()
        self._leases: dict[int, _Granted] = {}
        self._num_leases = 0

    def inject(self, *faults: Fault) -> None:
        """Has the next calls suffer `faults`, one each, and none after them."""
        self._faults = deque(faults)

    def go_down(self) -> None:
        """Leaves every call without an answer until `come_back`; leases go on expiring."""
        self.down_since_s = self.now_s

    def come_back(self, *, empty: bool = False) -> None:
        """Answers again; `empty` stands for a store that has lost its disk."""
        self.down_since_s = None
        if empty:
            self.revision = 1
            self.items.clear()
            self._leases.clear()

    def advance(self, duration_s: float) -> None:
        """Lets time pass; leases that run out on the way expire in order."""
        until_s = self.now_s + duration_s
        for lease_id, granted in sorted(self._leases.items(), key=lambda item: item[1].expires_s):
            if granted.expires_s <= until_s:
                self.now_s = granted.expires_s
                self.end_lease(lease_id)
        self.now_s = until_s

    def serve(self, request: Callable[[], Reply]) -> Reply:
        """Carries out one call, or lets it suffer the fault that is due and raises LostError."""
        if self.down_since_s is not None:
            raise LostError
        fault = self._faults.popleft() if self._faults else None
        if fault is Fault.LOSE_REQUEST:
            raise LostError
        reply = request()
        if fault is Fault.LOSE_REPLY:
            raise LostError
        return reply

    def commit(self, txn: Txn) -> TxnOutcome:
        """Runs a transaction."""
        found = tuple(self.items.get(condition.key) for condition in txn.conditions)
        if not all(map(Condition.holds, txn.conditions, found)):
            return TxnOutcome(False, self.revision, found)
        for change in txn.changes:
            if isinstance(change, Put) and change.lease and change.lease.lease_id not in self._leases:
                raise LeaseLostError(f"cannot write {change.key!r}: its lease has expired")
        self._apply([change for change in txn.changes if isinstance(change, Put) or change.key in self.items])
        return TxnOutcome(True, self.revision)

    def grant(self, ttl_s: int) -> Lease:
        """Makes a lease."""
        self._num_leases += 1
        self._leases[self._num_leases] = _Granted(ttl_s, self.now_s + ttl_s)
        return Lease(self._num_leases, ttl_s)

    def keep_alive(self, lease: Lease) -> bool:
        """Renews a lease if it is there."""
        granted = self._leases.get(lease.lease_id)
        if granted is not None:
            granted.expires_s = self.now_s + granted.ttl_s
        return granted is not None

    def end_lease(self, lease_id: int) -> None:
        """Deletes a lease and the keys that hang on it."""
        self._leases.pop(lease_id, None)
        self.delete([key for key, item in self.items.items() if item.lease_id == lease_id])

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes keys that exist, together and in order."""
        if keys:
            self.revision += 1
        for key in sorted(keys):
            self._delete(key)

    def _apply(self, changes: Sequence[Change]) -> None:
        if changes:
            self.revision += 1
        for change in changes:
            if isinstance(change, Put):
                self._put(change)
            else:
                self._delete(change.key)

    def _put(self, put: Put) -> None:
        before = self.items.get(put.key)
        created, version = (before.create_revision, before.version + 1) if before else (self.revision, 1)
        lease_id = put.lease.lease_id if put.lease else 0
        self.items[put.key] = KeyValue(put.key, put.value, created, self.revision, version, lease_id)

    def _delete(self, key: str) -> None:
        del self.items[key]
