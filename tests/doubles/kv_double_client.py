"""The clients of the store's double: a `KV` and its watches, as the store on etcd has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from engine.core.errors import CoordinatorUnavailableError
from engine.core.store.exactly_once import ReceiptBook, is_receipt
from engine.core.store.kv import Delete, EventKind, KeyValue, Lease, Outcome, Put, Snapshot, Txn, WatchEvent
from tests.doubles.kv_double import LostError, StoreDouble

ATTEMPTS = 5
WATCH_DEADLINE_S = 10.0

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

    def watch(self, prefix: str, from_revision: int) -> WatchDouble:
        """Watches the changes from a revision on."""
        return WatchDouble(self._store, self._root, prefix, from_revision)

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


class WatchDouble:
    """A watch; an event arrives when the store's delay has passed."""

    def __init__(self, store: StoreDouble, root: str, prefix: str, from_revision: int):
        assert from_revision >= 1
        self._store = store
        self._root = root
        self._prefix = prefix
        self._next = from_revision
        self._arrived: list[WatchEvent] = []
        store.before_compaction.append(self._pull)

    def take(self) -> Sequence[WatchEvent]:
        """Returns what has arrived."""
        if self._store.down_since_s is None:
            self._pull()
        elif self._store.now_s - self._store.down_since_s >= WATCH_DEADLINE_S:
            raise _unavailable()
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Ends the watch."""
        self._store.before_compaction.remove(self._pull)

    def _pull(self) -> None:
        store = self._store
        if self._next > store.revision + 1:
            raise CoordinatorUnavailableError("the coordinator's store has lost data")
        if self._next <= store.compacted:
            self._arrived.append(WatchEvent(EventKind.GAP, self._prefix, store.compacted))
            self._next = store.compacted + 1
        due = [event for made_s, event in store.history if made_s + store.watch_delay_s <= store.now_s]
        for event in due:
            key = event.key.removeprefix(self._root)
            wanted = event.key.startswith(self._root + self._prefix) and not is_receipt(key)
            if event.revision >= self._next and wanted:
                self._arrived.append(replace(event, key=key))
        if due:
            self._next = max(self._next, due[-1].revision + 1)


def _unavailable() -> CoordinatorUnavailableError:
    return CoordinatorUnavailableError("the coordinator's store did not answer")
