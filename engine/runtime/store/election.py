"""Leader election: at most one candidate holds a key, as long as it renews its lease.

Rules: no call blocks; a candidate polls again when the key may be free. `poll` is only a hint, because the lease may
have expired since the last renewal. So every write of the holder must have `fence` as a condition, which fails once
another candidate holds the key.
"""

from __future__ import annotations

from engine.core.errors import LeaseLostError, required
from engine.core.kv import KV, Condition, Delete, Lease, Put, Txn, absent, equal

LEASE_TTL_S = 15  # of the role on one host; a host of several has `--lease`
PRIVATE_TTL_S = 86_400  # the same in a private etcd, which ends with its only host: pausing the machine loses no role
RENEW_EVERY_NS = LEASE_TTL_S * 1_000_000_000 // 5


class Election:
    """One candidate for a key; `value` is unique among the candidates. The caller renews a `kept` lease."""

    def __init__(self, kv: KV, key: str, value: bytes, ttl_s: int, lease: Lease | None = None):
        self.key = key
        self._kv = kv
        self._value = value
        self._ttl_s = ttl_s
        self._host_lease = lease
        self._lease: Lease | None = None

    @property
    def fence(self) -> Condition:
        """The condition that this candidate still holds the key."""
        return equal(self.key, self._value)

    def poll(self) -> bool:
        """Takes the key if it is free; returns whether this candidate holds it."""
        if self._lease is None and self._kv.get(self.key) is None:
            lease = self._host_lease or self._kv.grant(self._ttl_s)
            try:
                outcome = self._kv.transact(Txn((absent(self.key),), (Put(self.key, self._value, lease),)))
            except LeaseLostError:
                return False  # the lease expired meanwhile: the next poll tries again
            if outcome.succeeded:
                self._lease = lease
            elif self._host_lease is None:
                self._kv.revoke(lease)
        return self._lease is not None

    def renew(self) -> bool:
        """Renews the lease; returns False if it has expired, so that another candidate may hold the key."""
        if self._host_lease is not None:
            return True
        if not self._kv.keep_alive(required(self._lease, "a candidate that renews has a lease")):
            self._lease = None
        return self._lease is not None

    def resign(self) -> None:
        """Releases the key, if this candidate holds it."""
        if self._lease is not None and self._host_lease is None:
            self._kv.revoke(self._lease)
        elif self._lease is not None:
            self._kv.transact(Txn((self.fence,), (Delete(self.key),)))
        self._lease = None
