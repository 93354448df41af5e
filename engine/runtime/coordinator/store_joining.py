"""The way of this host into the store of a run: one that the user names, or a private etcd that it starts."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine.core.coordinator.state import CoordinatorState
from engine.core.errors import CoordinatorUnavailableError, required
from engine.core.history.process_records import KeysLeftRecord, StoreRecord
from engine.core.store.kv import Lease
from engine.runtime.coordinator.node import Node
from engine.runtime.coordinator.standby import StandbyCoordinator, Start, plain_settings
from engine.runtime.ipc.recorder import Recorder, now_ns
from engine.runtime.process.interrupts import RunInterruptedError
from engine.runtime.store.election import LEASE_TTL_S, PRIVATE_TTL_S
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from engine.runtime.store.etcd_settings import EtcdSettings
from engine.runtime.store.store_keeper import StoreKeeper


def join_store(
    stack: contextlib.ExitStack,
    etcd: EtcdSettings | None,
    run_id: str,
    logs: Path,
    first: CoordinatorState,
    recorder: Recorder,
    start: Start | None = None,
    kept: Lease | None = None,
) -> Node:
    """Connects this host to the store, or to a private one that it starts; `stack` releases all of it.

    With `start`, coordinators are processes of their own that it starts. A thread renews the lease `kept`.
    """
    private = EmbeddedEtcd(logs) if etcd is None else None
    # It starts while this process imports gRPC, for a fifth of a second, and the fork server imports torch.
    if private is not None:
        stack.callback(private.stop)
        stack.enter_context(private.naming_cause())
        private.start()
    from engine.runtime.store.etcd_kv import EtcdKV

    settings = required(etcd if private is None else private.settings(), "a run has a store")
    if private is not None:
        stack.enter_context(StoreKeeper(private, recorder))
    endpoints = tuple(str(each) for each in settings.endpoints)
    recorder.write(StoreRecord(endpoints=endpoints, run_id=run_id, private=private is not None))
    kv = EtcdKV(settings, f"/bamboo/{run_id}/")
    stack.callback(kv.close)
    standby = None
    if start is not None:
        store = plain_settings(settings, None if private is None else logs)
        standby = StandbyCoordinator(start, store, run_id, kv, first, recorder)
        stack.callback(standby.close)
    node = Node(kv, first, now_ns(), standby, kept, LEASE_TTL_S if private is None else PRIVATE_TTL_S)
    if standby is not None:
        standby.while_waiting = lambda: node.renew(now_ns())
    if private is None:
        stack.callback(_leave, node, recorder)
    return node


def _leave(node: Node, recorder: Recorder) -> None:
    """Deletes the keys of the run in a store of the user; an error is recorded and does not change the outcome."""
    try:
        node.leave()
    except (CoordinatorUnavailableError, RunInterruptedError) as error:
        recorder.write(KeysLeftRecord(error=str(error)))
