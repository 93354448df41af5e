"""The preparation of an epoch that begins with a commit: a hand-over, or the exit after one.

    coordinator                         workers
    PrepareMessage(plan) ------------>  make the plan while they train
    <---------- PreparedMessage(digest)
    commit: with all answers, commit + epoch + start are one decision; else the usual messages of a recovery

Rules: an answer counts only for the plan that the commit then needs. No worker waits for an answer: if one is missing,
the leaving worker stays for one more step, provided that its grace is long enough, and for one step only. Another
coordinator prepares anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from engine.core.membership.events import Event, PlanAcknowledged, StepCommitted
from engine.core.membership.prepared_epoch import prepare_epoch
from engine.core.membership.state import State
from engine.core.messages import PlanMessage, PrepareMessage
from engine.core.ownership import Ownership

_STEPS_TO_LEAVE = 5  # steps of the present duration: a worker leaves within three, and later steps take longer


class Preparation(NamedTuple):
    """The epoch that the coming commit will begin, and the answers of the workers."""

    begun_ns: int  # when the open step began
    number: int = -1  # of the latest plan
    document: PlanMessage | None = None  # the latest plan
    digests: Mapping[int, str] = {}  # the answers, by worker
    deadlines_ns: Mapping[int, int] = {}  # the end of the grace of each worker that has given notice
    waited_in: int = 0  # the latest epoch in which a worker stayed for one more step


def noticed(preparation: Preparation, worker: int, until_ns: int) -> Preparation:
    """Returns the preparation after the notice of a worker."""
    return preparation._replace(deadlines_ns={worker: until_ns, **preparation.deadlines_ns})


def looked(
    preparation: Preparation, state: State, ownership: Ownership, now_ns: int
) -> tuple[Preparation, PrepareMessage | None]:
    """Returns the order to prepare the epoch that the commit of the open step will begin, if its plan has changed."""
    prepared = prepare_epoch(state, ownership, now_ns)
    if prepared is None or prepared.document == preparation.document:
        return preparation, None
    number = preparation.number + 1
    new = preparation._replace(number=number, document=prepared.document, digests={})
    return new, PrepareMessage(number, prepared.document)


def answered(preparation: Preparation, worker: int, number: int, digest: str) -> Preparation:
    """Returns the preparation after the answer of a worker; an answer to an older plan is ignored."""
    if number != preparation.number:
        return preparation
    return preparation._replace(digests={**preparation.digests, worker: digest})


def at_commit(
    preparation: Preparation, commit: StepCommitted, state: State, ownership: Ownership
) -> tuple[Preparation, tuple[Event, ...]]:
    """Returns the events to decide on at a commit: the commit alone, or with the events of the prepared epoch."""
    new = preparation._replace(begun_ns=commit.now_ns)
    prepared = prepare_epoch(state, ownership, commit.now_ns)
    if prepared is None:
        return new, (commit,)
    document, digests = prepared.document, preparation.digests
    if document == preparation.document and all(worker in digests for worker in document.members):
        agreed = (PlanAcknowledged(commit.now_ns, each, document.epoch, digests[each]) for each in document.members)
        return new, (*prepared.events, *agreed)
    leaves_at_ns = commit.now_ns + _STEPS_TO_LEAVE * (commit.now_ns - preparation.begun_ns)
    has_time = leaves_at_ns < min(preparation.deadlines_ns.get(worker, 0) for worker in state.leaving)
    if preparation.waited_in < state.epoch and has_time:
        return new._replace(waited_in=state.epoch), (replace(commit, waits=True),)
    return new, (commit,)
