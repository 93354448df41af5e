"""An election: one key that at most one candidate holds, for as long as it renews its lease.

Rules: nothing here waits; a candidate polls again when the key may be free. Holding the key is a hint, not a proof, as
the lease may have expired since it was last renewed: the writes of the holder must rest on `fence`, a condition that no
longer holds once the key is another's.
"""

from __future__ import annotations

from engine.core.errors import LeaseLostError
from engine.core.store.kv import KV, Condition, Lease, Put, Txn, absent, equal


class Election:
    """One candidate for a key; `value` names it, and no other candidate has the same."""

    def __init__(self, kv: KV, key: str, value: bytes, ttl_s: int):
        self.key = key
        self._kv = kv
        self._value = value
        self._ttl_s = ttl_s
        self._lease: Lease | None = None

    @property
    def fence(self) -> Condition:
        """The condition that this candidate still holds the key."""
        return equal(self.key, self._value)

    def poll(self) -> bool:
        """Returns whether this candidate holds the key, after a try to take it if it is free."""
        if self._lease is None and self._kv.get(self.key) is None:
            lease = self._kv.grant(self._ttl_s)
            try:
                outcome = self._kv.transact(Txn((absent(self.key),), (Put(self.key, self._value, lease),)))
            except LeaseLostError:
                return False  # it took longer than the lease: the next poll tries again
            if outcome.succeeded:
                self._lease = lease
            else:
                self._kv.revoke(lease)
        return self._lease is not None

    def renew(self) -> bool:
        """Renews the lease; False: it has expired, and another may hold the key."""
        assert self._lease is not None
        if not self._kv.keep_alive(self._lease):
            self._lease = None
        return self._lease is not None

    def resign(self) -> None:
        """Gives the key up, or stops being a candidate."""
        if self._lease is not None:
            self._kv.revoke(self._lease)
            self._lease = None
