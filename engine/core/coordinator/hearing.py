"""Hearing: the rule for each kind of message of a worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engine.core import messages
from engine.core.coordinator.equal_ends import survives
from engine.core.coordinator.next_group import heard_of, ready_joiners
from engine.core.coordinator.orders import Decided, decide, prepare, tell_all, tell_waiting_too
from engine.core.coordinator.outputs import CoordinatorOutput, Fail, Note, Write
from engine.core.coordinator.preparation import answered, at_commit
from engine.core.coordinator.state import CoordinatorState
from engine.core.errors import DivergedError, ExitCode
from engine.core.history.run_records import (
    FinishedRecord,
    PartitionRecord,
    RaisedRecord,
    SuspicionRecord,
    ValidationRecord,
)
from engine.core.membership.events import Heard, StepCommitted
from engine.core.membership.state import Phase
from engine.core.membership.verdicts import may_restart
from engine.core.message_codec import Message
from engine.core.process_messages import KeyMessage, NextGroupFormedMessage
from engine.core.recovery.ballot import NO_NORM, SKIP
from engine.core.recovery.plan_messages import InventoryMessage, PlannedMessage, PreparedMessage
from engine.core.recovery.vote import VoteMessage

MessageRule = Callable[[CoordinatorState, Heard[Message], Any], Decided]


def _decide(state: CoordinatorState, heard: Heard[Message], message: Message) -> Decided:
    """Leaves a message to the membership protocol, of which it is an event."""
    return decide(state, heard)


def _on_cut(state: CoordinatorState, heard: Heard[Message], cut: messages.CutMessage) -> Decided:
    record = PartitionRecord(starts=cut.starts, layers=cut.layers, samples=cut.samples)
    return state, (Write(record), *map(Note, cut.notes), tell_all(state, messages.PartitionMessage(cut.starts)))


def _relay(state: CoordinatorState, heard: Heard[Message], message: messages.BorderMessage) -> Decided:
    return state, (tell_all(state, message),)


def _on_key(state: CoordinatorState, heard: Heard[Message], told: KeyMessage) -> Decided:
    is_of_next = state.next_group.members and told.epoch == state.next_group.epoch
    return state, (tell_waiting_too(state, told) if is_of_next else tell_all(state, told),)


def _on_vote(state: CoordinatorState, heard: Heard[Message], vote: VoteMessage) -> Decided:
    """Counts votes; the last missing one commits the step. Raises DivergedError for a norm that is not finite."""
    if state.ballot is None:
        return state, ()
    ballot, commit = state.ballot.add(heard.worker, vote)
    new = state._replace(ballot=ballot)
    if commit is None or state.is_stopping:
        return new, ()
    if not math.isfinite(commit.grad_norm) and state.job.dtype == "float16":
        commit = commit._replace(grad_norm=NO_NORM, clip_factor=SKIP)  # the scale of the loss was too large
    elif not math.isfinite(commit.grad_norm):
        raise DivergedError(f"the gradient norm is {commit.grad_norm} at step {commit.step}; a lower lr often helps")
    ownership = ballot.ownership
    event = StepCommitted(heard.now_ns, vote.epoch, commit.step, ownership.shadows)
    joins = ready_joiners(state.next_group, state.membership)
    preparation, decisive = at_commit(state.preparation, event, state.membership, ownership, joins)
    first, *_ = decisive
    is_entered = isinstance(first, StepCommitted) and bool(first.joins)
    group = state.next_group._replace(is_entered=is_entered) if joins else state.next_group
    new = _keeps(new, commit.step, heard.now_ns)._replace(commit=commit, preparation=preparation, next_group=group)
    return decide(new, *decisive)


def _keeps(state: CoordinatorState, step: int, now_ns: int) -> CoordinatorState:
    """Returns the state after a commit, which is kept as a checkpoint if that is due."""
    is_last = step >= state.membership.last_step
    if not state.keeping.is_kept(step, is_last, now_ns - state.kept_ns):
        return state
    return state._replace(kept=step, kept_ns=now_ns)


def _on_validation(state: CoordinatorState, heard: Heard[Message], outcome: messages.ValidationMessage) -> Decided:
    records = [ValidationRecord(step=outcome.step, **asdict(each)) for each in outcome.sets]
    new = state._replace(validated=max(state.validated, outcome.step))
    notes = () if records else (Note("the data has no evaluation set: no validation"),)
    return new, (*notes, *map(Write, records), tell_all(new, messages.ValidatedMessage(outcome.step)))


def _on_finished(state: CoordinatorState, heard: Heard[Message], finished: messages.FinishedMessage) -> Decided:
    peak_stash, peak_memory_kib, sizes = finished.peak_stash, finished.peak_memory_kib, finished.sizes
    record = FinishedRecord(of=heard.worker, peak_stash=peak_stash, peak_memory_kib=peak_memory_kib, sizes=sizes)
    return _after(record, decide(state, heard))


def _on_suspicion(state: CoordinatorState, heard: Heard[Message], suspicion: messages.SuspicionMessage) -> Decided:
    record = SuspicionRecord(of=heard.worker, text=suspicion.text, peer=suspicion.peer)
    return _after(record, decide(state, heard))


def _on_raised(state: CoordinatorState, heard: Heard[Message], raised: messages.RaisedMessage) -> Decided:
    step = raised.step if state.started else -1
    record = RaisedRecord(at_ns=raised.at_ns, of=heard.worker, step=step, **asdict(raised.exception))
    if not state.is_stopping and state.started:
        state, goes_on = survives(state, heard.worker, raised)
        if goes_on:
            return state, (Write(record),)  # the end of its process makes the verdict
    return _after(record, _on_failed(state, heard, raised))


def _on_failed(
    state: CoordinatorState,
    heard: Heard[Message],
    last: messages.RefusedMessage | messages.FailedMessage | messages.RaisedMessage,
) -> Decided:
    membership = state.membership
    is_broken = isinstance(last, messages.FailedMessage) and last.code == ExitCode.NOT_RECOVERED
    if is_broken and (membership.phase is Phase.RESTARTING or may_restart(membership)):
        return state, ()  # a transfer broke, probably because another worker has died; an end of a process decides
    has_commit = membership.committed > membership.options.begun
    return state._replace(is_stopping=True), (Fail(heard.worker, last, has_commit),)


def _on_prepared(state: CoordinatorState, heard: Heard[Message], told: PreparedMessage) -> Decided:
    return state._replace(preparation=answered(state.preparation, heard.worker, told)), ()


def _on_next_group(state: CoordinatorState, heard: Heard[Message], told: NextGroupFormedMessage) -> Decided:
    group, given_up = heard_of(state.next_group, state.membership, heard.worker, told)
    if group is state.next_group or state.is_stopping:
        return state, ()
    new = state._replace(next_group=group)
    if given_up is None:
        return prepare(new, heard.now_ns)
    text = f"worker {heard.worker} could not form the group in which workers are to join: {told.failure}"
    return new, (tell_waiting_too(new, given_up), Note(text))


def _after(record: Any, result: Decided) -> Decided:
    """Returns a result with a record in front of its outputs."""
    first: CoordinatorOutput = Write(record)
    return result[0], (first, *result[1])


RULES: dict[type[Message], MessageRule] = {
    messages.CutMessage: _on_cut,
    messages.BorderMessage: _relay,
    messages.ReadyMessage: _decide,
    messages.WaitingMessage: _decide,
    messages.HeartbeatMessage: _decide,
    messages.ValidationMessage: _on_validation,
    messages.FinishedMessage: _on_finished,
    messages.SuspicionMessage: _on_suspicion,
    messages.RefusedMessage: _on_failed,
    messages.FailedMessage: _on_failed,
    messages.RaisedMessage: _on_raised,
    InventoryMessage: _decide,
    PlannedMessage: _decide,
    PreparedMessage: _on_prepared,
    VoteMessage: _on_vote,
    KeyMessage: _on_key,
    NextGroupFormedMessage: _on_next_group,
}
