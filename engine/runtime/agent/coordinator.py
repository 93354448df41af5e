"""The coordinator's role: runs the membership protocol of one job, with all that it knows in the store.

Rules: the new state is in the store, by compare-and-swap on the old one, before any effect is carried out; whoever
finds another state there than it wrote has been replaced, and does nothing more. An answer that orders nothing is not
written: the next coordinator asks again. Keys, under the run's own root:

``coordinator`` who holds the role, on a lease; ``state`` the protocol's state; ``epoch``, ``commit``, ``status`` and
``reconfigured`` what of it others want to read, ``verdicts`` the latest epochs and why they were made; ``plan`` the
input of the latest plan; ``members/N`` worker N, on its node's lease, with its slots now and before; ``heartbeats``
when each was last heard of. Their number depends on the workers only, not on the steps.
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

ROLE, STATE = "coordinator", "state"
_MAX_VERDICTS = 64


class Coordinator:
    """Whoever holds the role, once `election` is won: goes on with the state in the store, or begins with `first`.

    Raises InvariantError when what stands in the store was not written by a coordinator, CoordinatorUnavailableError
    when it was too slow.
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
        """Takes events in, all or none of them, and returns what is to be done.

        Raises CoordinatorUnavailableError when the store cannot be reached, or when another coordinator has written.
        """
        new, effects, changes = self.state, list[Effect](), dict[str, Change]()
        for event in events:
            old = new
            new, found = step(old, event)
            effects += found
            if new.epoch != old.epoch:
                self._verdicts = [*self._verdicts, (new.epoch, new.reason)][-_MAX_VERDICTS:]
            told = _changes(old, new, self._verdicts)
            told += (Put("plan", json.dumps(asdict(each)).encode()) for each in found if type(each) is PublishPlanInput)
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
            raise CoordinatorUnavailableError(f"this coordinator is out, nothing was written: {self._rival(holder)}")

    def _rival(self, holder: KeyValue | None) -> str:
        """Returns who has come between, in words."""
        if holder is None:
            return f"the key {ROLE!r} is gone, with its lease or by another's hand"
        if not self._election.fence.holds(holder):
            return f"the key {ROLE!r} now names {holder.value.decode(errors='replace')[:80]!r}"
        return f"another has written the key {STATE!r}"


def _resume(found: KeyValue, now_ns: int) -> State:
    try:
        return resume(found.value.decode(errors="replace"), now_ns)
    except InvariantError as error:
        raise InvariantError(f"the key {STATE!r} of this run holds something else: {error}") from error


def _read_verdicts(found: KeyValue | None) -> list[tuple[int, str]]:
    try:
        return [(int(epoch), str(reason)) for epoch, reason in json.loads(found.value)] if found is not None else []
    except (TypeError, ValueError) as error:
        raise InvariantError(f"the key 'verdicts' of this run holds something else: {error!r}") from error


def _changes(old: State, new: State, verdicts: list[tuple[int, str]]) -> list[Change]:
    """Returns what of the state has changed for readers; nothing if only its clocks have."""
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
