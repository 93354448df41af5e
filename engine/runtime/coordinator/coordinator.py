"""The coordinator: runs the machine of `engine/core/coordinator` for one job and keeps its state in the store.

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

import json
from collections.abc import Mapping
from dataclasses import asdict

from engine.core.coordinator.inputs import CoordinatorInput
from engine.core.coordinator.machine import is_to_be_kept, step
from engine.core.coordinator.outputs import CoordinatorOutput
from engine.core.coordinator.state import ROLE, STATE, CoordinatorState, documents, resume
from engine.core.errors import CoordinatorUnavailableError, InvariantError
from engine.core.membership.effects import plan_document
from engine.core.store.kv import KV, Change, KeyValue, Put, Txn, absent, equal
from engine.runtime.store.election import Election

# The usual reason for an expired lease, and the remedy.
STOOD_STILL = (
    "the launcher had no processor time for many seconds, or the machine slept: run less beside it, and start again"
)
_MAX_VERDICTS = 64


class Coordinator:
    """The coordinator of a run after it has won `election`; continues with the state in the store, else with `first`.

    Raises InvariantError if the store holds no state of a coordinator, CoordinatorUnavailableError if another
    coordinator was faster.
    """

    def __init__(self, kv: KV, election: Election, first: CoordinatorState, now_ns: int):
        self._kv = kv
        self._election = election
        found = {each.key: each for each in kv.read_prefix("").items}
        known = found.get(STATE)
        self.state = first if known is None else _resume(first, found, now_ns)
        self._written = documents(self.state)
        self._verdicts = _read_verdicts(found.get("verdicts"))
        unchanged = absent(STATE) if known is None else equal(STATE, known.value)
        changes = [Put(key, text.encode()) for key, text in self._written.items()]
        status = Put("status", self.state.membership.phase.encode())
        self._transact(Txn((election.fence, unchanged), (*changes, status)))

    def handle(self, given: CoordinatorInput) -> tuple[CoordinatorOutput, ...]:
        """Applies an input as one transaction and returns the outputs.

        Raises CoordinatorUnavailableError if the store cannot be reached or another coordinator has written, and the
        errors of the machine.
        """
        new, outputs = step(self.state, given)
        if is_to_be_kept(self.state, new, given, outputs):
            verdicts, now = self._verdicts, new.membership
            if now.epoch != self.state.membership.epoch:
                verdicts = [*verdicts, (now.epoch, now.reason)][-_MAX_VERDICTS:]
            written = documents(new)
            changed = [Put(key, text.encode()) for key, text in written.items() if text != self._written.get(key)]
            changes = (*changed, *_changes(self.state, new, verdicts))
            self._transact(Txn((self._election.fence, equal(STATE, self._written[STATE].encode())), changes))
            self._written, self._verdicts = written, verdicts
        self.state = new
        return outputs

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


def _resume(first: CoordinatorState, found: Mapping[str, KeyValue], now_ns: int) -> CoordinatorState:
    texts = {key: each.value.decode(errors="replace") for key, each in found.items()}
    try:
        return resume(first.job, texts, now_ns)
    except InvariantError as error:
        raise InvariantError(f"the key {STATE!r} of this run is not of a coordinator: {error}") from error


def _read_verdicts(found: KeyValue | None) -> list[tuple[int, str]]:
    try:
        return [(int(epoch), str(reason)) for epoch, reason in json.loads(found.value)] if found is not None else []
    except (TypeError, ValueError) as error:
        raise InvariantError(f"the key 'verdicts' of this run is not of a coordinator: {error!r}") from error


def _changes(old: CoordinatorState, new: CoordinatorState, verdicts: list[tuple[int, str]]) -> list[Change]:
    """Returns the changes of the keys for readers."""
    was, now = old.membership, new.membership
    changes: list[Change] = [Put("status", now.phase.encode())]
    if now.epoch != was.epoch:
        changes.append(Put("epoch", str(now.epoch).encode()))
        changes.append(Put("verdicts", json.dumps(verdicts).encode()))
        if now.planned:
            changes.append(Put("reconfigured", json.dumps({"epoch": now.epoch, "reason": now.reason}).encode()))
    if new.planned != old.planned:
        plan = asdict(plan_document(now)) | {"verdict": now.verdict}
        changes.append(Put("plan", json.dumps(plan).encode()))
    return changes
