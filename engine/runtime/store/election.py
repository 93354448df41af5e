"""An election: one key that at most one candidate holds, for as long as it renews its lease.

Rules: nothing here waits; a candidate polls when its watch is readable, and renews when it holds the key. Holding it
is a hint, not a proof, as the lease may have expired since it was last renewed: what the holder writes must rest on
`fence`, which no longer holds once the key is another's.
"""

from __future__ import annotations

from engine.core.errors import LeaseLostError
from engine.core.store.kv import KV, Condition, EventKind, Lease, Put, Txn, Watch, absent, equal


class Election:
    """One candidate for a key; `value` names it, and no other candidate has the same."""

    def __init__(self, kv: KV, key: str, value: bytes, ttl_s: int):
        self.key = key
        self.watch: Watch | None = None  # while another holds the key: something to take may mean that it is free
        self._kv = kv
        self._value = value
        self._ttl_s = ttl_s
        self._lease: Lease | None = None

    @property
    def fence(self) -> Condition:
        """The condition that this candidate still holds the key."""
        return equal(self.key, self._value)

    def poll(self) -> bool:
        """Returns whether this candidate holds the key, after a try to take it if it may be free."""
        if self._lease is not None:
            return True
        if self.watch is not None:
            if all(event.kind is EventKind.PUT for event in self.watch.take()):
                return False
            self._stop_watching()
        return self._take()

    def renew(self) -> bool:
        """Renews the lease; False: it has expired, and another may hold the key."""
        assert self._lease is not None
        if not self._kv.keep_alive(self._lease):
            self._lease = None
        return self._lease is not None

    def resign(self) -> None:
        """Gives the key up, or stops being a candidate."""
        self._stop_watching()
        if self._lease is not None:
            self._kv.revoke(self._lease)
            self._lease = None

    def _take(self) -> bool:
        seen = self._kv.read_prefix(self.key)
        revision = seen.revision
        if not any(item.key == self.key for item in seen.items):
            lease = self._kv.grant(self._ttl_s)
            try:
                outcome = self._kv.transact(Txn((absent(self.key),), (Put(self.key, self._value, lease),)))
            except LeaseLostError:
                return False  # it took longer than the lease: the next poll tries again
            if outcome.succeeded:
                self._lease = lease
                return True
            self._kv.revoke(lease)
            revision = outcome.revision
        # From the next revision on, so that a release between the look and the watch is not missed.
        self.watch = self._kv.watch(self.key, revision + 1)
        return False

    def _stop_watching(self) -> None:
        if self.watch is not None:
            self.watch.close()
            self.watch = None
