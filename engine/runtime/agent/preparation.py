"""The agent's part in preparing an epoch that begins with a commit: a hand-over, or the end of one who has handed over.

Rules: the workers make the plan while they train, and answer with its digest. When everybody has answered for just
what the commit then brings, the commit, the epoch and its start are decided as one; else they go the usual way.
Nobody waits for an answer: where one is missing, whoever is leaving stays for one more step, if its grace is long
enough, and no longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from engine.core.membership.effects import PublishPlanInput
from engine.core.membership.events import Event, PlanAcknowledged, StepCommitted
from engine.core.membership.prepared_epoch import prepare_epoch
from engine.core.membership.state import State
from engine.core.ownership import Ownership
from engine.runtime.ipc.recorder import now_ns

_STEPS_TO_LEAVE = 5  # as long as the one that ends: in three more a worker has left, and later ones take longer


class HandOverPreparation:
    """What the coming commit will bring, as far as it is known, and who has prepared; `order` tells the workers."""

    def __init__(self, order: Callable[[int, PublishPlanInput], None]):
        self._order = order
        self._numbers = count()
        self._number = -1  # of the latest order
        self._document: PublishPlanInput | None = None  # what it was about
        self._digests: dict[int, str] = {}  # the answers to it
        self._deadlines_ns: dict[int, int] = {}  # when the grace of each that has given notice ends
        self._begun_ns = now_ns()  # when the open step began
        self._waited_in = 0  # the latest epoch in which somebody stayed for one more step

    def noticed(self, worker: int, grace_ns: int) -> None:
        """Takes in that a worker is going to leave."""
        self._deadlines_ns.setdefault(worker, now_ns() + grace_ns)

    def look(self, state: State, ownership: Ownership | None) -> None:
        """Has the workers prepare for what the commit of the open step will bring, when that is news."""
        prepared = prepare_epoch(state, ownership, now_ns()) if ownership is not None else None
        if prepared is not None and prepared.document != self._document:
            self._number, self._document, self._digests = next(self._numbers), prepared.document, {}
            self._order(self._number, prepared.document)

    def answered(self, worker: int, number: int, digest: str) -> None:
        """Takes in that a worker has prepared; what it says of an order before the latest counts for nothing."""
        if number == self._number:
            self._digests[worker] = digest

    def at_commit(self, commit: StepCommitted, state: State, ownership: Ownership) -> tuple[Event, ...]:
        """Returns what there is to decide on with a commit: it alone, or with it the epoch that has been prepared."""
        begun_ns, self._begun_ns = self._begun_ns, commit.now_ns
        prepared = prepare_epoch(state, ownership, commit.now_ns)
        if prepared is None:
            return (commit,)
        document, digests = prepared.document, self._digests
        if document == self._document and all(worker in digests for worker in document.members):
            agreed = (PlanAcknowledged(commit.now_ns, each, document.epoch, digests[each]) for each in document.members)
            return (*prepared.events, *agreed)
        leaves_at_ns = commit.now_ns + _STEPS_TO_LEAVE * (commit.now_ns - begun_ns)
        has_time = leaves_at_ns < min(self._deadlines_ns.get(worker, 0) for worker in state.leaving)
        if self._waited_in < state.epoch and has_time:
            self._waited_in = state.epoch
            return (replace(commit, waits=True),)
        return (commit,)
