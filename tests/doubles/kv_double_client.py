"""The clients of the store's double: a `KV` like the store on etcd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from engine.core.errors import CoordinatorUnavailableError
from engine.core.kv import Delete, KeyValue, Lease, Put, StoreSnapshot, Txn, TxnOutcome, settled
from tests.doubles.kv_double import LostError, StoreDouble

ATTEMPTS = 5

Reply = TypeVar("Reply")


class ClientDouble:
    """One client: its keys stand under `root`; it gives up after `ATTEMPTS` lost calls."""

    def __init__(self, store: StoreDouble, root: str):
        self._store = store
        self._root = root

    def get(self, key: str) -> KeyValue | None:
        """Returns what `key` holds."""
        return self._near(self._call(lambda: self._store.items.get(self._root + key)))

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Writes a key."""
        txn = self._far(Txn((), (Put(key, value, lease),)))
        return self._call(lambda: self._store.commit(txn)).revision

    def transact(self, txn: Txn) -> TxnOutcome:
        """Runs a transaction, again after a lost reply."""
        num_tries = 0

        def commit() -> TxnOutcome:
            return self._store.commit(self._far(txn))

        def serve() -> TxnOutcome:
            nonlocal num_tries
            num_tries += 1
            return self._store.serve(commit)

        outcome = self._call(serve, is_served=True)
        outcome = replace(outcome, found=tuple(map(self._near, outcome.found)))
        return settled(txn, outcome) if num_tries > 1 else outcome

    def read_prefix(self, prefix: str) -> StoreSnapshot:
        """Returns all keys under `prefix`."""
        items, revision = self._call(lambda: (sorted(self._store.items.items()), self._store.revision))
        found = (self._near(item) for key, item in items if key.startswith(self._root + prefix))
        return StoreSnapshot(tuple(item for item in found if item is not None), revision)

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
        """Has nothing to take back."""

    def _call(self, request: Callable[[], Reply], *, is_served: bool = False) -> Reply:
        for _ in range(ATTEMPTS):
            try:
                return request() if is_served else self._store.serve(request)
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
