"""The coordinator's store on etcd, through the `etcd3` package: an implementation of engine/core/store/kv.py.

Rules: all keys are under the root, ``/bamboo/<run-id>/``; no other key is read or changed. Only the connection, the
messages and the stubs of the package are used. Its locks, refresh and `limit` have bugs, which the tests show.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

from engine.core.errors import LeaseLostError, ensure
from engine.core.store.kv import Change, Condition, KeyValue, Lease, Put, StoreSnapshot, Txn, TxnOutcome, settled
from engine.runtime.store.etcd_calls import DEADLINE_S, EtcdCalls, rpc
from engine.runtime.store.etcd_keys import KeySpace
from engine.runtime.store.etcd_settings import EtcdSettings


class EtcdKV:
    """One client of the store; thread-safe, but not usable in a forked child."""

    def __init__(self, settings: EtcdSettings, root: str, deadline_s: float = DEADLINE_S):
        is_of_run = re.fullmatch(r"/bamboo/[^/]+/", root) is not None
        ensure(is_of_run, f"keys stand under /bamboo/<run-id>/, not {root!r}")
        self._calls = EtcdCalls(settings, deadline_s, root)
        self._keys = KeySpace(root)

    def get(self, key: str) -> KeyValue | None:
        """Returns the content of `key`, or None if it does not exist."""
        return self._item(self._calls.call("Range", rpc.RangeRequest(key=self._keys.far(key))).kvs)

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Writes a key that has no other writer; returns the revision."""
        revision: int = self._calls.call("Put", self._put_request(Put(key, value, lease))).header.revision
        return revision

    def transact(self, txn: Txn) -> TxnOutcome:
        """Runs a transaction; see `KV.transact`."""
        until_s, request = time.monotonic() + self._calls.deadline_s, self._txn_request(txn)
        is_repeated = False
        while (reply := self._calls.attempt("Txn", request, until_s)) is None:
            is_repeated = True
        found = () if reply.succeeded else tuple(self._item(each.response_range.kvs) for each in reply.responses)
        outcome = TxnOutcome(reply.succeeded, reply.header.revision, found)
        return settled(txn, outcome) if is_repeated else outcome

    def read_prefix(self, prefix: str) -> StoreSnapshot:
        """Returns all keys under `prefix`, read at one revision."""
        start, end = self._keys.far_range(prefix)
        reply = self._calls.call("Range", rpc.RangeRequest(key=start, range_end=end))
        return StoreSnapshot(tuple(map(self._near, reply.kvs)), reply.header.revision)

    def delete_prefix(self, prefix: str) -> None:
        """Deletes all keys under `prefix`, atomically."""
        start, end = self._keys.far_range(prefix)
        self._calls.call("DeleteRange", rpc.DeleteRangeRequest(key=start, range_end=end))

    def grant(self, ttl_s: int) -> Lease:
        """Makes a lease of at least `ttl_s` seconds. If its reply is lost, it expires unused."""
        reply = self._calls.call("LeaseGrant", rpc.LeaseGrantRequest(TTL=ttl_s))
        return Lease(reply.ID, reply.TTL)

    def keep_alive(self, lease: Lease) -> bool:
        """Renews a lease; returns False if it has expired. Raises if there is no answer within its time to live."""
        deadline_s = min(self._calls.deadline_s, lease.ttl_s)
        reply = self._calls.call("LeaseKeepAlive", rpc.LeaseKeepAliveRequest(ID=lease.lease_id), deadline_s)
        alive: bool = reply.TTL > 0  # for an expired lease, etcd replies with a time to live of 0
        return alive

    def revoke(self, lease: Lease) -> None:
        """Ends a lease and deletes its keys."""
        with contextlib.suppress(LeaseLostError):
            self._calls.call("LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease.lease_id))

    def close(self) -> None:
        """Disconnects."""
        self._calls.close()

    def _item(self, kvs: Any) -> KeyValue | None:
        return self._near(kvs[0]) if kvs else None

    def _near(self, each: Any) -> KeyValue:
        key = self._keys.near(each.key)
        return KeyValue(key, each.value, each.create_revision, each.mod_revision, each.version, each.lease)

    def _put_request(self, put: Put) -> Any:
        lease_id = put.lease.lease_id if put.lease else 0
        return rpc.PutRequest(key=self._keys.far(put.key), value=put.value, lease=lease_id)

    def _txn_request(self, txn: Txn) -> Any:
        return rpc.TxnRequest(
            compare=[self._compare(each) for each in txn.conditions],
            success=[self._change(each) for each in txn.changes],
            failure=[
                rpc.RequestOp(request_range=rpc.RangeRequest(key=self._keys.far(each.key))) for each in txn.conditions
            ],
        )

    def _compare(self, condition: Condition) -> Any:
        key = self._keys.far(condition.key)
        if condition.value is None:
            return rpc.Compare(key=key, target=rpc.Compare.VERSION, result=rpc.Compare.EQUAL, version=0)
        return rpc.Compare(key=key, target=rpc.Compare.VALUE, result=rpc.Compare.EQUAL, value=condition.value)

    def _change(self, change: Change) -> Any:
        if isinstance(change, Put):
            return rpc.RequestOp(request_put=self._put_request(change))
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._keys.far(change.key)))
