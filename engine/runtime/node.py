"""This host's hold on the store: one client, the node's lease, and the coordinator's role if it has won it.

Rules: there is one client per host, here and nowhere else. Whoever cannot renew its lease for longer than it lasts is
out, whatever it believes, and stops. The members' keys hang on the node's lease; one that has ended is deleted at once.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable

from engine.core.errors import CoordinatorUnavailableError
from engine.core.kv import KV
from engine.core.membership_effects import Effect
from engine.core.membership_events import Event
from engine.core.membership_state import State
from engine.runtime.coordinator import ROLE, Coordinator
from engine.runtime.election import Election
from engine.runtime.roster import Member

LEASE_TTL_S = 10
_RENEW_EVERY_NS = LEASE_TTL_S * 1_000_000_000 // 3
_REPORT_EVERY_NS = 1_000_000_000


class Node:
    """This host in the store of one run; its agent is the coordinator."""

    def __init__(self, kv: KV, first: State, now_ns: int):
        self.name = socket.gethostname()
        self._kv = kv
        self._lease = kv.grant(LEASE_TTL_S)
        self._election = Election(kv, ROLE, f"{self.name}:{os.getpid()}".encode(), LEASE_TTL_S)
        if not self._election.poll():
            raise CoordinatorUnavailableError("another coordinator holds this run")
        self._coordinator = Coordinator(kv, self._election, first, now_ns)
        self._renewed_ns = now_ns
        self._reported_ns = now_ns

    @property
    def state(self) -> State:
        """What the coordinator knows."""
        return self._coordinator.state

    def handle(self, event: Event) -> tuple[Effect, ...]:
        """Takes an event in and returns what is to be done; raises CoordinatorUnavailableError."""
        return self._coordinator.handle(event)

    def enrol(self, members: Iterable[Member]) -> None:
        """Writes down where each worker runs, with its slots now and before."""
        for member in members:
            value = {"pid": member.child.pid, "node": self.name, "now": member.slots, "before": []}
            self._kv.put(f"members/{member.worker}", json.dumps(value).encode(), self._lease)

    def report(self, now_ns: int) -> None:
        """Writes down when each worker was last heard of, at most once a second."""
        if now_ns - self._reported_ns < _REPORT_EVERY_NS:
            return
        self._reported_ns = now_ns
        sightings = self.state.sightings
        ages = {worker: round((now_ns - seen.heard_ns) / 1e9, 3) for worker, seen in sightings.items()}
        self._kv.put("heartbeats", json.dumps(ages).encode(), self._lease)

    def strike_off(self, worker: int) -> None:
        """Deletes the key of a worker that has ended; nobody waits for a lease."""
        self._kv.delete_prefix(f"members/{worker}")

    def renew(self, now_ns: int) -> None:
        """Renews what this host holds, when it is time; raises CoordinatorUnavailableError if it has lost it."""
        if now_ns - self._renewed_ns < _RENEW_EVERY_NS:
            return
        self._renewed_ns = now_ns
        if not (self._kv.keep_alive(self._lease) and self._election.renew()):
            raise CoordinatorUnavailableError("the lease of this host has expired: for the others it is out")

    def leave(self) -> None:
        """Deletes every key of the run."""
        self._kv.delete_prefix("")
