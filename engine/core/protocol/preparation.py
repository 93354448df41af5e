"""The preparation of an epoch that begins with a commit: slots move, or a worker leaves after a hand-over.

    coordinator                         workers
    PrepareMessage(plan) ------------>  make the plan while they train
    <---------- PreparedMessage(digest)
    commit: with all answers, commit + epoch + start are one decision; else the usual messages of a recovery

Rules: the protocol is pure, so its table can be applied to events that have not happened yet. The inventories follow
from the commit: every replica has voted for it and is therefore whole at the boundary, and no worker has begun the next
step. If another event comes first, the prepared epoch is not used. An answer counts only for the plan that the commit
then needs. No worker waits for an answer: if one is missing, the epoch comes one step later, provided that the grace of
each leaving worker is long enough, and one step only. Another coordinator prepares anew.

In an elastic job a leaving worker with much time keeps its slots for some steps, until the owners that the policy wants
hold whole replicas. So the slots move once, and not to a shadow first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from engine.core.errors import InvariantError
from engine.core.ownership import Ownership
from engine.core.program.inventory import Inventory as Held
from engine.core.program.inventory import (
    InventoryMessage,
    PlanMessage,
    PlannedMessage,
    PreparedMessage,
    PrepareMessage,
    to_json,
)
from engine.core.protocol.coordinator_state import Preparation
from engine.core.protocol.events import Event, StepCommitted, WorkerWord
from engine.core.protocol.membership import PublishPlanInput, step
from engine.core.protocol.state import Phase, State

_STEPS_TO_LEAVE = 5  # steps of the present duration: a worker leaves within three, and later steps take longer
_STEPS_TO_SETTLE = 5  # in which the policy is asked, the members learn of its wish, and replicas are sent


def noticed(preparation: Preparation, worker: int, until_ns: int, committed: int = -1) -> Preparation:
    """Returns the preparation after the notice of a worker, which came after the commit of a step."""
    return preparation._replace(
        deadlines_ns={worker: until_ns, **preparation.deadlines_ns},
        noticed_after={worker: committed, **preparation.noticed_after},
    )


def patient(preparation: Preparation, state: State, now_ns: int) -> tuple[int, ...]:
    """Returns the leaving workers that keep their slots at the next commit, unless the wanted owners can take them."""
    if not preparation.elastic or not state.steps_ns:
        return ()
    leaves_at_ns = now_ns + (_STEPS_TO_SETTLE + _STEPS_TO_LEAVE) * max(state.steps_ns)
    return tuple(
        worker
        for worker in state.leaving
        if preparation.deadlines_ns.get(worker, 0) > leaves_at_ns
        and state.committed - preparation.noticed_after.get(worker, state.committed) < _STEPS_TO_SETTLE
    )


def looked(
    preparation: Preparation, state: State, ownership: Ownership, now_ns: int, joins: tuple[int, ...] = ()
) -> tuple[Preparation, PrepareMessage | None]:
    """Returns the order to prepare the epoch that the commit of the open step will begin, if its plan has changed.

    The workers in `joins` become members with it.
    """
    prepared = prepare_epoch(state, ownership, now_ns, joins, patient(preparation, state, now_ns))
    if prepared is None or prepared.document == preparation.document:
        return preparation, None
    number = preparation.number + 1
    new = preparation._replace(number=number, document=prepared.document, digests={})
    return new, PrepareMessage(number, prepared.document)


def answered(preparation: Preparation, worker: int, answer: PreparedMessage) -> Preparation:
    """Returns the preparation after the answer of a worker; an answer to an older plan is ignored.

    The numbers of a coordinator that takes over begin anew, but it makes an epoch first, so no answer fits by chance.
    """
    document = preparation.document
    if document is None or (answer.epoch, answer.number) != (document.epoch, preparation.number):
        return preparation
    return preparation._replace(digests={**preparation.digests, worker: answer.digest})


def at_commit(
    preparation: Preparation, commit: StepCommitted, state: State, ownership: Ownership, joins: tuple[int, ...] = ()
) -> tuple[Preparation, tuple[Event, ...]]:
    """Returns the events to decide on at a commit: the commit alone, or with the events of the prepared epoch.

    No member waits for the workers in `joins`: they join with a prepared epoch only.
    """
    new = preparation._replace(begun_ns=commit.now_ns)
    commit = replace(commit, patient=patient(preparation, state, commit.now_ns))
    prepared = prepare_epoch(state, ownership, commit.now_ns, joins, commit.patient)
    if prepared is None:
        return new, (commit,)
    document, digests = prepared.document, preparation.digests
    if document == preparation.document and all(worker in digests for worker in document.members):
        answers = {each: PlannedMessage(document.epoch, digests[each], ()) for each in document.members}
        return new, (*prepared.events, *(WorkerWord(commit.now_ns, each, answer) for each, answer in answers.items()))
    if joins and prepare_epoch(state, ownership, commit.now_ns, (), commit.patient) is None:
        return new, (commit,)
    leaves_at_ns = commit.now_ns + _STEPS_TO_LEAVE * (commit.now_ns - preparation.begun_ns)
    has_time = leaves_at_ns < min((preparation.deadlines_ns.get(worker, 0) for worker in state.leaving), default=inf)
    if preparation.waited_in < state.epoch and has_time:
        return new._replace(waited_in=state.epoch), (replace(commit, waits=True),)
    return new, (commit,)


@dataclass(frozen=True, slots=True)
class PreparedEpoch:
    """A prepared epoch: the events that lead to it (the commit, the inventories), and the input of its plan."""

    events: tuple[Event, ...]
    document: PlanMessage


def prepare_epoch(
    state: State, ownership: Ownership, now_ns: int, joins: tuple[int, ...] = (), patient: tuple[int, ...] = ()
) -> PreparedEpoch | None:
    """Returns the epoch that the commit of the open step, with this ownership, begins; None if it begins none."""
    if state.phase is not Phase.RUNNING or not (state.leaving or state.wanted or joins):
        return None
    commit = StepCommitted(now_ns, state.epoch, state.committed + 1, ownership.shadows, joins=joins, patient=patient)
    new, effects = step(state, commit)
    if new.phase is not Phase.RECONFIGURING:
        return None
    held = (held_at_boundary(worker, new.committed + 1, ownership) for worker in new.members)
    answers = tuple(
        WorkerWord(now_ns, each.worker, InventoryMessage(new.epoch, to_json(each), ownership.grid.places(each.whole)))
        for each in held
    )
    for answer in answers:
        new, effects = step(new, answer)
    (effect,) = effects
    if not isinstance(effect, PublishPlanInput):
        raise InvariantError(f"the last inventory of a prepared epoch led to {effect}")
    return PreparedEpoch((commit, *answers), effect.document)


def held_at_boundary(worker: int, step: int, ownership: Ownership) -> Held:
    """Returns the inventory of a worker at the boundary before `step`, after a step with this ownership."""
    slots = tuple(sorted(ownership.held_by(worker)))
    nothing = dict.fromkeys(slots, 0)
    return Held(worker, step, slots, nothing, nothing, (), ())
