"""The coordinator: runs the membership protocol of one job and keeps its state in the store.

Rules: the coordinator writes the new state by compare-and-swap on the old one, and then carries out the effects. If it
finds a state that it did not write, another coordinator has replaced it, and it stops. An answer without an effect is
not written: the next coordinator asks again. Keys under the root of the run; their number does not grow with the steps:

    coordinator                       holder of the role; on a lease
    state                             state of the protocol
    epoch, commit, status             parts of the state, for readers
    reconfigured                      the last epoch that began at a step boundary, and its reason
    verdicts                          the latest epochs and their reasons
    plan                              input of the latest plan
    members/N                         worker N with its slots now and before; on the lease of its host
    heartbeats                        the time, and the seconds since the last message of each worker
"""

from __future__ import annotations

import json
from dataclasses import asdict

from engine.core.errors import CoordinatorUnavailableError, InvariantError
from engine.core.membership.effects import Effect, PublishPlanInput
from engine.core.membership.events import Answer, Event
from engine.core.membership.protocol import step
from engine.core.membership.state import Phase, State, resume, to_json
from engine.core.store.kv import KV, Change, KeyValue, Put, Txn, absent, equal
from engine.runtime.store.election import Election

# The usual reason for an expired lease, and the remedy.
STOOD_STILL = (
    "the launcher had no processor time for many seconds, or the machine slept: run less beside it, and start again"
)
ROLE, STATE = "coordinator", "state"
_MAX_VERDICTS = 64


class Coordinator:
    """The coordinator of a run after it has won `election`; continues with the state in the store, else with `first`.

    Raises InvariantError if the store holds no state of a coordinator, CoordinatorUnavailableError if another
    coordinator was faster.
    """

    def __init__(self, kv: KV, election: Election, first: State, now_ns: int):
        self._kv = kv
        self._election = election
        found = kv.get(STATE)
        self.state = first if found is None else _resume(found, now_ns)
        self._written = to_json(self.state).encode()
        self._verdicts = _read_verdicts(kv.get("verdicts"))
        unchanged = absent(STATE) if found is None else equal(STATE, found.value)
        changes: list[Change] = [Put(STATE, self._written), Put("status", self.state.phase.encode())]
        self._transact(Txn((election.fence, unchanged), tuple(changes)))

    def handle(self, *events: Event) -> tuple[Effect, ...]:
        """Applies events as one transaction and returns their effects.

        Raises CoordinatorUnavailableError if the store cannot be reached or another coordinator has written.
        """
        new, effects, changes = self.state, list[Effect](), dict[str, Change]()
        for event in events:
            old = new
            new, found = step(old, event)
            effects += found
            if new.epoch != old.epoch:
                self._verdicts = [*self._verdicts, (new.epoch, new.reason)][-_MAX_VERDICTS:]
            told = _changes(old, new, self._verdicts)
            told += (Put("plan", _plan_text(each)) for each in found if isinstance(each, PublishPlanInput))
            changes |= {change.key: change for change in told}
        if changes and (effects or not all(isinstance(event, Answer) for event in events)):
            written = to_json(new).encode()
            conditions = (self._election.fence, equal(STATE, self._written))
            self._transact(Txn(conditions, (Put(STATE, written), *changes.values())))
            self._written = written
        self.state = new
        return tuple(effects)

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


def _resume(found: KeyValue, now_ns: int) -> State:
    try:
        return resume(found.value.decode(errors="replace"), now_ns)
    except InvariantError as error:
        raise InvariantError(f"the key {STATE!r} of this run is not of a coordinator: {error}") from error


def _read_verdicts(found: KeyValue | None) -> list[tuple[int, str]]:
    try:
        return [(int(epoch), str(reason)) for epoch, reason in json.loads(found.value)] if found is not None else []
    except (TypeError, ValueError) as error:
        raise InvariantError(f"the key 'verdicts' of this run is not of a coordinator: {error!r}") from error


def _plan_text(effect: PublishPlanInput) -> bytes:
    return json.dumps(asdict(effect.document) | {"verdict": effect.verdict}).encode()


def _changes(old: State, new: State, verdicts: list[tuple[int, str]]) -> list[Change]:
    """Returns the changes of the keys for readers; none if only clocks have changed."""
    if new.decided() == old.decided():
        return []
    changes: list[Change] = [Put("status", new.phase.encode())]
    if new.epoch != old.epoch:
        changes.append(Put("epoch", str(new.epoch).encode()))
        changes.append(Put("verdicts", json.dumps(verdicts).encode()))
    if new.committed != old.committed:
        changes.append(Put("commit", str(new.committed).encode()))
    if new.phase is Phase.RECONFIGURING and new.epoch != old.epoch:
        changes.append(Put("reconfigured", json.dumps({"epoch": new.epoch, "reason": new.reason}).encode()))
    return changes
