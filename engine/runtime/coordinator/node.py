"""This host in the store: one client, the lease of the host, and the role of the coordinator.

Rules: a host has one client, this one. If a lease has expired, the host is out and stops: it makes no more calls, and
deletes no key, because the key may belong to another host by now. A lease lasts longer than the deadline of a call, so
that a short outage of the store costs no lease. The keys of the workers are on the lease of the host; the key of a
worker that has ended is deleted at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

from engine.core.coordinator.inputs import CoordinatorInput
from engine.core.coordinator.outputs import CoordinatorOutput
from engine.core.coordinator.state import ROLE, CoordinatorState
from engine.core.errors import CoordinatorUnavailableError, LeaseLostError
from engine.core.membership.run_status import Slots
from engine.core.membership.state import State
from engine.core.ownership import by_slot
from engine.core.store.kv import KV, Delete, Lease, Txn
from engine.runtime.coordinator.coordinator import STOOD_STILL, Coordinator
from engine.runtime.coordinator.standby import StandbyCoordinator
from engine.runtime.store.election import LEASE_TTL_S, RENEW_EVERY_NS, Election

_REPORT_EVERY_NS = 1_000_000_000


class Node:
    """This host in the store of one run; its agent is the coordinator. A thread may keep its lease, then `kept`."""

    def __init__(
        self,
        kv: KV,
        first: CoordinatorState,
        now_ns: int,
        standby: StandbyCoordinator | None = None,
        kept: Lease | None = None,
        ttl_s: int = LEASE_TTL_S,
    ):
        self.name = socket.gethostname()
        self._kv = kv
        self._is_out = False
        self._kept = kept
        self._lease = kept or kv.grant(ttl_s)
        candidate = f"{self.name}:{os.getpid()}" + (f":{kept.lease_id:x}" if kept else "")
        self._election = Election(kv, ROLE, candidate.encode(), ttl_s, kept)
        if standby is None and not self._election.poll():
            raise CoordinatorUnavailableError("another coordinator holds this run")
        self._is_candidate = standby is None  # else a process of its own is
        self._coordinator = standby or Coordinator(kv, self._election, first, now_ns)
        self._renewed_ns = now_ns
        self._reported_ns = now_ns
        self._enrolled: dict[int, tuple[int, Slots, str]] = {}  # pid, slots and host of each worker, as written

    @property
    def coordination(self) -> CoordinatorState:
        """The state of the coordinator."""
        return self._coordinator.state

    @property
    def state(self) -> State:
        """The state of the membership protocol."""
        return self._coordinator.state.membership

    def handle(self, given: CoordinatorInput) -> tuple[CoordinatorOutput, ...]:
        """Applies an input as one transaction and returns the outputs; raises CoordinatorUnavailableError."""
        with self._in_or_out():
            return self._coordinator.handle(given)

    def enrol(self, worker: int, pid: int, now: Slots, before: Slots = (), host: str = "") -> None:
        """Writes the key of a worker: its pid, its host if that is not this one, its slots, and those before."""
        value = {"pid": pid, "node": host or self.name, "now": now, "before": before}
        with self._in_or_out():
            self._kv.put(_key(worker), json.dumps(value).encode(), self._lease)
        self._enrolled[worker] = (pid, now, host)

    def report(self, now_ns: int) -> None:
        """Writes changed slots and the age of each worker's last message, at most once a second."""
        if self._is_out or now_ns - self._reported_ns < _REPORT_EVERY_NS:
            return
        self._reported_ns = now_ns
        sightings = self.state.sightings
        for worker, (pid, before, host) in self._enrolled.items():
            now = _slots_of(worker, self.state)
            if worker in self.state.members and now != before:
                self.enrol(worker, pid, now, before, host)
        ages = {worker: round((now_ns - seen.heard_ns) / 1e9, 3) for worker, seen in sightings.items()}
        with self._in_or_out():
            self._kv.put("heartbeats", json.dumps({"at_ns": now_ns, "ages": ages}).encode(), self._lease)

    def strike_off(self, worker: int) -> None:
        """Deletes the key of a worker that has ended, before its lease expires."""
        self._enrolled.pop(worker, None)
        if not self._is_out:
            with self._in_or_out():
                self._kv.transact(Txn((), (Delete(_key(worker)),)))

    def renew(self, now_ns: int) -> None:
        """Renews the leases of this host when they are due; raises CoordinatorUnavailableError if one has expired."""
        if self._kept is not None or self._is_out or now_ns - self._renewed_ns < RENEW_EVERY_NS:
            return
        self._renewed_ns = now_ns
        with self._in_or_out():
            if not (self._kv.keep_alive(self._lease) and (not self._is_candidate or self._election.renew())):
                raise LeaseLostError

    def leave(self) -> None:
        """Deletes every key of the run unless this host is out; raises CoordinatorUnavailableError.

        Of several hosts another one may have to finish the run: the keys go when its outcome is told.
        """
        if not self._is_out and self._kept is None:
            self._kv.delete_prefix("")
            self._election.resign()
            self._kv.revoke(self._lease)

    @contextlib.contextmanager
    def _in_or_out(self) -> Iterator[None]:
        """Makes CoordinatorUnavailableError of a lost lease; after this error, the host makes no more calls."""
        try:
            yield
        except LeaseLostError:
            self._is_out = True
            raise CoordinatorUnavailableError(
                f"the lease of this host has expired: the other hosts count it as out ({STOOD_STILL})"
            ) from None
        except CoordinatorUnavailableError:
            self._is_out = True
            raise


def _slots_of(worker: int, state: State) -> Slots:
    return tuple(slot for slot, owner in by_slot(state.owners, state.options.stages).items() if owner == worker)


def _key(worker: int) -> str:
    return f"members/{worker}"
