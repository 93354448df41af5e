"""Random sequences of calls, with faults, done to the double and to a real etcd: whatever they say must be the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule, run_state_machine_as_test

from engine.core.errors import LeaseLostError
from engine.core.kv import Condition, Delete, KeyValue, Lease, Put, Txn, absent, equal
from engine.runtime.store import etcd_kv
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from tests.doubles.kv_double import Fault
from tests.runtime.kv_backends import Backend, DoubleBackend, EtcdBackend

KEYS = st.sampled_from(["m/1", "m/2", "m/3", "m", "n/1"])
PREFIXES = st.sampled_from(["", "m", "m/", "n/", "x"])
VALUES = st.sampled_from([b"", b"1", b"2"])
CONDITIONS = st.lists(st.one_of(KEYS.map(absent), st.builds(equal, KEYS, VALUES)), max_size=3)
LEASE_PLACES = st.integers(-1, 1)
FAULTS = st.lists(st.sampled_from(Fault), max_size=3)


class Twin:
    """One of the two stores, with what the machine has made there; revisions count from its start."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.clients = [backend.client(), backend.client()]
        self.base = self.clients[0].put("start", b"")
        self.leases: list[Lease] = []

    def item(self, item: KeyValue | None) -> KeyValue | None:
        """Returns an item as it would be if the store had been empty, with the number of its lease."""
        if item is None:
            return None
        lease = next((place for place, each in enumerate(self.leases) if each.lease_id == item.lease_id), -1)
        created, revision = item.create_revision - self.base, item.revision - self.base
        return replace(item, create_revision=created, revision=revision, lease_id=lease)


class SameAnswers(RuleBasedStateMachine):
    """Does each call to both."""

    make_etcd: Callable[[], Backend]
    leases: Bundle[int] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.twins = [Twin(DoubleBackend()), Twin(type(self).make_etcd())]

    def teardown(self) -> None:
        for twin in self.twins:
            twin.clients[0].delete_prefix("")
            twin.backend.close()

    def both(self, call: Callable[[Twin], Any]) -> Any:
        """Makes a call to both, and returns the answer that they share."""
        answers = []
        for twin in self.twins:
            try:
                answers.append(call(twin))
            except LeaseLostError:
                answers.append("lease lost")
        assert answers[0] == answers[1]
        return answers[0]

    @rule(client=st.integers(0, 1), key=KEYS, value=VALUES, lease=LEASE_PLACES)
    def put(self, client: int, key: str, value: bytes, lease: int) -> None:
        """Writes a key, perhaps with a lease."""
        self.both(lambda twin: twin.clients[client].put(key, value, chosen(twin, lease)) - twin.base)

    @rule(
        client=st.integers(0, 1),
        conditions=CONDITIONS,
        puts=st.dictionaries(KEYS, VALUES, max_size=3),
        deletes=st.sets(KEYS, max_size=2),
        lease=LEASE_PLACES,
        faults=FAULTS,
    )
    def transact(
        self,
        client: int,
        conditions: list[Condition],
        puts: dict[str, bytes],
        deletes: set[str],
        lease: int,
        faults: list[Fault],
    ) -> None:
        """Runs a transaction whose first calls suffer faults."""

        def call(twin: Twin) -> Any:
            changes = [Put(key, value, chosen(twin, lease)) for key, value in puts.items()]
            twin.backend.lose(twin.clients[client], *faults)
            outcome = twin.clients[client].transact(
                Txn(tuple(conditions), (*changes, *(Delete(key) for key in sorted(deletes - puts.keys()))))
            )
            found = [twin.item(item) for item in outcome.found]
            return outcome.succeeded, outcome.revision - twin.base, found

        self.both(call)
        for twin in self.twins:
            twin.backend.lose(twin.clients[client])

    @rule(client=st.integers(0, 1), key=KEYS)
    def get(self, client: int, key: str) -> None:
        """Reads a key."""
        self.both(lambda twin: twin.item(twin.clients[client].get(key)))

    @rule(client=st.integers(0, 1), prefix=PREFIXES)
    def read_prefix(self, client: int, prefix: str) -> None:
        """Reads a prefix."""

        def call(twin: Twin) -> Any:
            snapshot = twin.clients[client].read_prefix(prefix)
            return [twin.item(item) for item in snapshot.items], snapshot.revision - twin.base

        self.both(call)

    @rule(client=st.integers(0, 1), prefix=PREFIXES.filter(bool))
    def delete_prefix(self, client: int, prefix: str) -> None:
        """Deletes a prefix; not everything, of which the machine counts revisions."""
        self.both(lambda twin: twin.clients[client].delete_prefix(prefix))

    @rule(target=leases)
    def grant(self) -> int:
        """Makes a lease."""
        for twin in self.twins:
            twin.leases.append(twin.clients[0].grant(60))
        return len(self.twins[0].leases) - 1

    @rule(lease=leases)
    def keep_alive(self, lease: int) -> None:
        """Renews a lease, which may have been revoked."""
        self.both(lambda twin: twin.clients[1].keep_alive(twin.leases[lease]))

    @rule(lease=leases)
    def revoke(self, lease: int) -> None:
        """Ends a lease, perhaps again."""
        self.both(lambda twin: twin.clients[1].revoke(twin.leases[lease]))


def chosen(twin: Twin, place: int) -> Lease | None:
    """Returns the lease at a place, if there is one."""
    return twin.leases[place] if 0 <= place < len(twin.leases) else None


def test_the_double_answers_as_etcd_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_kv, "PAUSE_S", 0.0)  # between attempts
    # An etcd of its own: in a shared one a lease of some earlier test may end just now, which counts as a revision.
    with EmbeddedEtcd(tmp_path) as server:
        machine = type("Machine", (SameAnswers,), {"make_etcd": lambda: EtcdBackend(server.settings())})
        run_state_machine_as_test(machine, settings=settings(max_examples=20, stateful_step_count=25, deadline=None))
