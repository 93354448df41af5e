"""The coordinator: runs the machine of `core/protocol/coordinator.py` for one job and keeps its state in the store.

Rules: the coordinator writes the new state by compare-and-swap on the old one, and then returns the outputs. If it
finds a state that it did not write, another coordinator has replaced it, and it stops. Keys under the root of the run;
their number does not grow with the steps:

    coordinator                       holder of the role; on a lease
    state                             state of the membership protocol
    commit                            the last commit: step, loss, norm of the gradients, clip factor
    facts                             the other facts that the next coordinator needs
    epoch, status                     parts of the state, for readers
    reconfigured                      the last epoch that began at a step boundary, and its reason
    verdicts                          the latest epochs and their reasons
    plan                              input of the latest plan
    members/N                         worker N with its slots now and before; on the lease of its host
    heartbeats                        the time, and the seconds since the last message of each worker
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.codec.documents import documents, resume
from engine.codec.values import plain_of, read, text_of
from engine.core.errors import CoordinatorUnavailableError, InvariantError, LeaseLostError, required
from engine.core.history.process_records import KeysLeftRecord, StoreRecord
from engine.core.kv import KV, Change, Delete, KeyValue, Lease, Put, Txn, absent, equal
from engine.core.ownership import by_slot
from engine.core.program.build import baseline
from engine.core.protocol.coordinator import is_to_be_kept, step
from engine.core.protocol.coordinator_state import ROLE, STATE, CoordinatorState
from engine.core.protocol.inputs_outputs import CoordinatorInput, CoordinatorOutput
from engine.core.protocol.membership import plan_document
from engine.core.protocol.run_status import Heartbeats, Member, Slots, Verdicts
from engine.core.protocol.state import Phase, State
from engine.runtime.process.clock import now_ns
from engine.runtime.process.interrupts import RunInterruptedError
from engine.runtime.process.recorder import Recorder
from engine.runtime.store.election import LEASE_TTL_S, PRIVATE_TTL_S, RENEW_EVERY_NS, Election
from engine.runtime.store.embedded_etcd import EmbeddedEtcd, StoreKeeper
from engine.runtime.store.etcd_settings import EtcdSettings

# The usual reason for an expired lease, and the remedy.
STOOD_STILL = "the launcher had no processor time for many seconds, or the machine slept: free some cores, and restart"
_MAX_VERDICTS = 64


class Coordinator:
    """The coordinator of a run after it has won `election`; continues with the state in the store, else with `first`.

    Raises InvariantError if the store holds no state of a coordinator, CoordinatorUnavailableError if another
    coordinator was faster.
    """

    def __init__(self, kv: KV, election: Election, first: CoordinatorState, now_ns: int):
        self._kv = kv
        self._election = election
        entries = {item.key: item for item in kv.read_prefix("").items}
        entry = entries.get(STATE)
        self.state = first if entry is None else _resume(first, entries, now_ns)
        self._written = documents(self.state)
        self._foreseen: tuple[str, tuple[int, ...]] | None = None
        self._verdicts = _read_verdicts(entries.get("verdicts"))
        unchanged = absent(STATE) if entry is None else equal(STATE, entry.value)
        changes = [Put(key, text.encode()) for key, text in self._written.items()]
        status = Put("status", self.state.membership.phase.encode())
        self._transact(Txn((election.fence, unchanged), (*changes, status)))

    def handle(self, event: CoordinatorInput) -> tuple[CoordinatorOutput, ...]:
        """Applies an input as one transaction and returns the outputs; raises the errors of the machine.

        Raises CoordinatorUnavailableError if the store cannot be reached or another coordinator has written.
        """
        new, outputs = step(self.state, event)
        if is_to_be_kept(self.state, new, event, outputs):
            verdicts, now = self._verdicts, new.membership
            if now.epoch != self.state.membership.epoch:
                verdicts = [*verdicts, (now.epoch, now.reason)][-_MAX_VERDICTS:]
            written = documents(new)
            changed = [Put(key, text.encode()) for key, text in written.items() if text != self._written.get(key)]
            changes = (*changed, *_changes(self.state, new, verdicts))
            self._transact(Txn((self._election.fence, equal(STATE, self._written[STATE].encode())), changes))
            self._written, self._verdicts = written, verdicts
        self.state = new
        self._foresee_repair()
        return outputs

    def _foresee_repair(self) -> None:
        """Lets a thread compute what the repair of the open step looks up, once for its schedule and owners."""
        job, state = self.state.job, self.state.membership
        began = state.schedule or job.schedule, state.began
        if began != self._foreseen and state.phase is Phase.RUNNING and job.retains:
            self._foreseen = began
            key = began[0], job.grid, state.began
            threading.Thread(target=baseline, args=key, name="baseline", daemon=True).start()

    def _transact(self, txn: Txn) -> None:
        outcome = self._kv.transact(txn)
        if not outcome.succeeded:
            holder, _ = outcome.found
            raise CoordinatorUnavailableError(
                f"this coordinator was replaced and has written nothing: {self._rival(holder)}"
            )

    def _rival(self, holder: KeyValue | None) -> str:
        """Returns in words the reason for the failed transaction."""
        if holder is None:
            return f"the key {ROLE!r} is gone: its lease has expired ({STOOD_STILL}), or another client has deleted it"
        if not self._election.fence.holds(holder):
            return f"the key {ROLE!r} now names {holder.value.decode(errors='replace')[:80]!r}"
        return f"another client has written the key {STATE!r}"


def _resume(first: CoordinatorState, entries: Mapping[str, KeyValue], now_ns: int) -> CoordinatorState:
    texts = {key: entry.value.decode(errors="replace") for key, entry in entries.items()}
    try:
        return resume(first.job, texts, now_ns)
    except InvariantError as error:
        raise InvariantError(f"the key {STATE!r} of this run is not of a coordinator: {error}") from error


def _read_verdicts(entry: KeyValue | None) -> list[tuple[int, str]]:
    try:
        return [] if entry is None else [*read(entry.value, Verdicts, "list of verdicts")]
    except InvariantError as error:
        raise InvariantError(f"the key 'verdicts' of this run is not of a coordinator: {error}") from error


def _changes(old: CoordinatorState, new: CoordinatorState, verdicts: list[tuple[int, str]]) -> list[Change]:
    was, now = old.membership, new.membership
    changes: list[Change] = [Put("status", now.phase.encode())]
    if now.epoch != was.epoch:
        changes.append(Put("epoch", str(now.epoch).encode()))
        changes.append(Put("verdicts", text_of(verdicts).encode()))
        if now.planned:
            changes.append(Put("reconfigured", text_of({"epoch": now.epoch, "reason": now.reason}).encode()))
    if new.planned != old.planned:
        plan = plain_of(plan_document(now)) | {"verdict": now.verdict}
        changes.append(Put("plan", text_of(plan).encode()))
    return changes


# This host in the store: one client, the lease of the host, and the role of the coordinator.
#
# Rules: a host has one client, this one. If a lease has expired, the host is out and stops: it makes no more calls, and
# deletes no key, because the key may belong to another host by now. A lease lasts longer than the deadline of a call,
# so that a short outage of the store costs no lease. The keys of the workers are on the lease of the host; the key of a
# worker that has ended is deleted at once.

_REPORT_EVERY_NS = 1_000_000_000


class Node:
    """This host in the store of one run; its agent is the coordinator. A thread may keep its lease, then `kept`."""

    def __init__(
        self, kv: KV, first: CoordinatorState, now_ns: int, lease: Lease | None = None, ttl_s: int = LEASE_TTL_S
    ):
        self.name = socket.gethostname()
        self._kv = kv
        self._is_out = False
        self._host_lease = lease
        self._lease = lease or kv.grant(ttl_s)
        candidate = f"{self.name}:{os.getpid()}" + (f":{lease.lease_id:x}" if lease else "")
        self._election = Election(kv, ROLE, candidate.encode(), ttl_s, lease)
        if not self._election.poll():
            raise CoordinatorUnavailableError("another coordinator holds this run")
        self._coordinator = Coordinator(kv, self._election, first, now_ns)
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

    def handle(self, event: CoordinatorInput) -> tuple[CoordinatorOutput, ...]:
        """Applies an input as one transaction and returns the outputs; raises CoordinatorUnavailableError."""
        with self._in_or_out():
            return self._coordinator.handle(event)

    def enrol(self, worker: int, pid: int, now: Slots, before: Slots = (), host: str = "") -> None:
        """Writes the key of a worker: its pid, its host if that is not this one, its slots, and those before."""
        value = Member(pid, host or self.name, now, before)
        with self._in_or_out():
            self._kv.put(_key(worker), text_of(value).encode(), self._lease)
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
        ages = {worker: round((now_ns - sighting.heard_ns) / 1e9, 3) for worker, sighting in sightings.items()}
        with self._in_or_out():
            self._kv.put("heartbeats", text_of(Heartbeats(now_ns, ages)).encode(), self._lease)

    def delete_member_key(self, worker: int) -> None:
        """Deletes the key of a worker that has ended, before its lease expires."""
        self._enrolled.pop(worker, None)
        if not self._is_out:
            with self._in_or_out():
                self._kv.transact(Txn((), (Delete(_key(worker)),)))

    def renew(self, now_ns: int) -> None:
        """Renews the leases of this host when they are due; raises CoordinatorUnavailableError if one has expired."""
        if self._host_lease is not None or self._is_out or now_ns - self._renewed_ns < RENEW_EVERY_NS:
            return
        self._renewed_ns = now_ns
        with self._in_or_out():
            if not (self._kv.keep_alive(self._lease) and self._election.renew()):
                raise LeaseLostError

    def leave(self) -> None:
        """Deletes every key of the run unless this host is out; raises CoordinatorUnavailableError.

        Of several hosts another one may have to finish the run: the keys go when its outcome is told.
        """
        if not self._is_out and self._host_lease is None:
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


# The way of this host into the store of a run: one that the user names, or a private etcd that it starts.
def join_store(
    stack: contextlib.ExitStack,
    etcd: EtcdSettings | None,
    run_id: str,
    logs: Path,
    first: CoordinatorState,
    recorder: Recorder,
    lease: Lease | None = None,
) -> Node:
    """Connects this host to the store, or to a private one, until `stack` closes; a thread renews `lease`."""
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
    node = Node(kv, first, now_ns(), lease, LEASE_TTL_S if private is None else PRIVATE_TTL_S)
    if private is None:
        stack.callback(_leave, node, recorder)
    return node


def _leave(node: Node, recorder: Recorder) -> None:
    """Deletes the keys of the run in a store of the user; an error is recorded and does not change the outcome."""
    try:
        node.leave()
    except (CoordinatorUnavailableError, RunInterruptedError) as error:
        recorder.write(KeysLeftRecord(error=str(error)))
