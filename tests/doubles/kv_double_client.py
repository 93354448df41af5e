"""The clients of the store's double: a `KV` like the store on etcd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from engine.core.errors import CoordinatorUnavailableError
from engine.core.store.exactly_once import ReceiptBook, is_receipt
from engine.core.store.kv import Delete, KeyValue, Lease, Outcome, Put, Snapshot, Txn
from tests.doubles.kv_double import LostError, StoreDouble

ATTEMPTS = 5

Reply = TypeVar("Reply")


class ClientDouble:
    """One client: its keys stand under `root`, no other has its name, it gives up after `ATTEMPTS` lost calls."""

    def __init__(self, store: StoreDouble, root: str, name: str):
        self._store = store
        self._root = root
        self._receipts = ReceiptBook(name)

    def get(self, key: str) -> KeyValue | None:
        """Returns what `key` holds."""
        return self._near(self._call(lambda: self._store.items.get(self._root + key)))

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Writes a key."""
        txn = self._far(Txn((), (Put(key, value, lease),)))
        return self._call(lambda: self._store.commit(txn)).revision

    def transact(self, txn: Txn) -> Outcome:
        """Runs a transaction exactly once."""
        num_lost = 0

        def send(txn: Txn) -> Outcome | None:
            nonlocal num_lost
            try:
                outcome = self._store.serve(lambda: self._store.commit(self._far(txn)))
            except LostError:
                num_lost += 1
                if num_lost == ATTEMPTS:
                    raise _unavailable() from None
                return None
            return replace(outcome, found=tuple(map(self._near, outcome.found)))

        return self._receipts.transact(txn, send)

    def read_prefix(self, prefix: str) -> Snapshot:
        """Returns all keys under `prefix`."""
        items, revision = self._call(lambda: (sorted(self._store.items.items()), self._store.revision))
        found = (self._near(item) for key, item in items if key.startswith(self._root + prefix))
        return Snapshot(tuple(item for item in found if item is not None and not is_receipt(item.key)), revision)

    def delete_prefix(self, prefix: str) -> None:
        """Deletes all keys under `prefix`."""
        store = self._store
        self._call(lambda: store.delete([key for key in store.items if key.startswith(self._root + prefix)]))

    def grant(self, ttl_s: int) -> Lease:
        """Makes a lease."""
        return self._call(lambda: self._store.grant(ttl_s))

    def keep_alive(self, lease: Lease) -> bool:
        """Renews a lease; False: it has expired."""
        return self._call(lambda: self._store.keep_alive(lease))

    def revoke(self, lease: Lease) -> None:
        """Ends a lease."""
        self._call(lambda: self._store.end_lease(lease.lease_id))

    def close(self) -> None:
        """Takes the receipt back."""
        self.delete_prefix(self._receipts.key)

    def _call(self, request: Callable[[], Reply]) -> Reply:
        for _ in range(ATTEMPTS):
            try:
                return self._store.serve(request)
            except LostError:
                continue
        raise _unavailable()

    def _far(self, txn: Txn) -> Txn:
        conditions = (replace(each, key=self._root + each.key) for each in txn.conditions)
        changes: tuple[Put | Delete, ...] = tuple(replace(each, key=self._root + each.key) for each in txn.changes)
        return Txn(tuple(conditions), changes)

    def _near(self, item: KeyValue | None) -> KeyValue | None:
        return item and replace(item, key=item.key.removeprefix(self._root))


def _unavailable() -> CoordinatorUnavailableError:
    return CoordinatorUnavailableError("the coordinator's store did not answer")
