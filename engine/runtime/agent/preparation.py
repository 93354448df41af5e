"""The agent's part in the preparation of an epoch that begins with a commit: a hand-over, or the exit after one.

    agent                               workers
    PrepareMessage(plan) ------------>  make the plan while they train
    <---------- PreparedMessage(digest)
    commit: with all answers, commit + epoch + start are one decision; else the usual messages of a recovery

Rules: an answer counts only for the plan that the commit then needs. No worker waits for an answer: if one is missing,
the leaving worker stays for one more step, provided that its grace is long enough, and for one step only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from engine.core.membership.events import Event, PlanAcknowledged, StepCommitted
from engine.core.membership.prepared_epoch import prepare_epoch
from engine.core.membership.state import State
from engine.core.messages import PlanMessage
from engine.core.ownership import Ownership
from engine.runtime.ipc.recorder import now_ns

_STEPS_TO_LEAVE = 5  # steps of the present duration: a worker leaves within three, and later steps take longer


class HandOverPreparation:
    """The epoch that the coming commit will begin, and the answers of the workers; `order` sends the plan to them."""

    def __init__(self, order: Callable[[int, PlanMessage], None]):
        self._order = order
        self._numbers = count()
        self._number = -1  # of the latest plan
        self._document: PlanMessage | None = None  # the latest plan
        self._digests: dict[int, str] = {}  # the answers, by worker
        self._deadlines_ns: dict[int, int] = {}  # the end of the grace of each worker that has given notice
        self._begun_ns = now_ns()  # when the open step began
        self._waited_in = 0  # the latest epoch in which a worker stayed for one more step

    def noticed(self, worker: int, grace_ns: int) -> None:
        """Handles the notice of a worker."""
        self._deadlines_ns.setdefault(worker, now_ns() + grace_ns)

    def look(self, state: State, ownership: Ownership | None) -> None:
        """Lets the workers prepare the epoch that the commit of the open step will begin, if its plan has changed."""
        prepared = prepare_epoch(state, ownership, now_ns()) if ownership is not None else None
        if prepared is not None and prepared.document != self._document:
            self._number, self._document, self._digests = next(self._numbers), prepared.document, {}
            self._order(self._number, prepared.document)

    def answered(self, worker: int, number: int, digest: str) -> None:
        """Handles the answer of a worker; an answer to an older plan is ignored."""
        if number == self._number:
            self._digests[worker] = digest

    def at_commit(self, commit: StepCommitted, state: State, ownership: Ownership) -> tuple[Event, ...]:
        """Returns the events to decide on at a commit: the commit alone, or with the events of the prepared epoch."""
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
