"""The rules of the worker machine from the begin of a step to the end of the job, and those of all modes.

A broken transfer is only a suspicion: the worker reports it, and the next epoch has the verdict. No worker begins the
next step before the result of a validation: until then it can be redone.
"""

from __future__ import annotations

from typing import Any

from engine.core import messages
from engine.core.checkpoints.keeping import shares_of
from engine.core.config.job import is_due
from engine.core.errors import ExitCode, InvariantError
from engine.core.message_codec import Message
from engine.core.ownership import Slot
from engine.core.process_messages import NoticeMessage
from engine.core.worker import inputs
from engine.core.worker.outputs import (
    Audit,
    CloseGroup,
    Drop,
    End,
    Enter,
    Keep,
    Output,
    PlanNextStep,
    ReleaseSends,
    ReportDone,
    Run,
    Say,
    TakeNextStep,
    TakeStep,
    Validate,
)
from engine.core.worker.state import Mode, WorkerState

Stepped = tuple[WorkerState, tuple[Output, ...]]


def changes_nothing(state: WorkerState, given: Any) -> Stepped:
    """Ignores an input that comes late, or twice."""
    return state, ()


def joins(state: WorkerState, built: inputs.Built) -> Stepped:
    """Tells the agent that this worker has joined, or that it waits."""
    new = state._replace(
        mode=Mode.WAITING if built.waits else Mode.BOUNDARY,
        worker=built.worker,
        step=built.step,
        ownership=built.ownership,
        held=built.ownership.held_by(built.worker),
        members=built.ownership.workers(),
        validate_every=built.validate_every,
        audit_every=built.audit_every,
    )
    return new, (Say(messages.WaitingMessage(built.joins) if built.waits else messages.ReadyMessage()),)


def gives_notice(state: WorkerState, given: inputs.NoticeGiven) -> Stepped:
    """Tells the agent of the notice; once is enough."""
    if state.has_given_notice:
        return state, ()
    return state._replace(has_given_notice=True), (Say(NoticeMessage()),)


def has_run(state: WorkerState, ended: inputs.ProgramEnded) -> Stepped:
    """Waits for the commit."""
    return state._replace(mode=Mode.VOTED), ()


def takes_step(state: WorkerState, commit: messages.CommitMessage) -> Stepped:
    """Takes the committed step; an earlier commit is a repetition."""
    if commit.step == state.step:
        return state, (TakeStep(commit),)
    return is_known(state, commit)


def is_known(state: WorkerState, commit: messages.CommitMessage) -> Stepped:
    """Ignores the commit of a step that has been taken; raises InvariantError for any other."""
    if commit.step >= state.step:
        where = f"worker {state.worker} is {state.mode} in step {state.step}"
        raise InvariantError(f"step {commit.step} is committed, and {where}")
    return state, ()


def opens_step(state: WorkerState, taken: inputs.StepTaken) -> Stepped:
    """Closes the step with its audit and validation; then the next one begins, or an epoch, or the end."""
    commit = taken.commit
    is_over = commit.then == "end"
    new = state._replace(step=state.step + 1, is_over=is_over, opens=state.program != "usual", kept=())
    # A replica without a part in the step has missed it.
    audits, gathers = audit(state, commit, state.held), tuple[Output, ...]()
    if state.ownership.grid.fsdp:  # an epoch may end the wait, and what is behind it; one that is due gathers itself
        audits, gathers = (), audits if commit.then != "epoch" else ()
    outputs: tuple[Output, ...] = (Drop(state.held), *audits)
    if commit.keep:
        new, outputs = keeps(new, outputs)
    outputs = (*outputs, *gathers, ReleaseSends())
    if commit.then == "epoch":
        return new._replace(mode=Mode.BOUNDARY), outputs  # its GoMessage orders the validation of this step
    if is_due(state.validate_every, commit.step, is_over):
        return new._replace(mode=Mode.VALIDATING), (*outputs, Validate(commit.step, new.ownership))
    return go_on(new, outputs)


def go_on(state: WorkerState, before: tuple[Output, ...]) -> Stepped:
    """Runs the open step; the step after one of a recovery gets its program first; no step is left at the end."""
    if state.is_over:
        return state._replace(mode=Mode.DONE), (*before, ReportDone(state.ownership.slots_of(state.worker)))
    if state.opens:
        return state._replace(mode=Mode.VOTED), (*before, TakeNextStep())
    return state._replace(mode=Mode.RUNNING), (*before, Run(state.program))


def heals(state: WorkerState, made: inputs.NextStepMade) -> Stepped:
    """Runs the open step with all shadows; if some of them are new, the step after it has another program again."""
    ownership = made.ownership
    new = state._replace(
        ownership=ownership,
        held=ownership.held_by(state.worker),
        program="heal" if made.is_healing else "usual",
        opens=False,
    )
    outputs: tuple[Output, ...] = (Enter(ownership),)
    if made.is_healing:
        outputs = (*outputs, PlanNextStep(new.step, ownership, new.members, new.leaving, new.wanted, new.hosts))
    return go_on(new, outputs)


def has_passed(state: WorkerState, ended: inputs.PassEnded) -> Stepped:
    """Reports the result of the validation pass, if it is here."""
    if ended.sets is None:
        return state, ()
    return state, (Say(messages.ValidationMessage(state.step - 1, ended.sets)),)


def is_validated(state: WorkerState, told: messages.ValidatedMessage) -> Stepped:
    """Goes on after the validation of the last step."""
    return go_on(state, ()) if told.step == state.step - 1 else (state, ())


def keeps(state: WorkerState, before: tuple[Output, ...]) -> Stepped:
    """Writes this worker's share of the state after the last step, as far as that has not begun."""
    shares = shares_of(state.ownership, state.worker)
    new = tuple(each for each in shares if each.slot not in state.kept)
    if not new:
        return state, before
    return state._replace(kept=(*state.kept, *(each.slot for each in new))), (*before, Keep(state.step - 1, new))


def audit(state: WorkerState, commit: messages.CommitMessage, slots: tuple[Slot, ...]) -> tuple[Output, ...]:
    """Returns the order to send the hashes of these slots, if an audit is due after the step.

    With shards a member must be in its group for it: they are gathered. An epoch that ends this wait begins with it.
    """
    is_asked = commit.keep or is_due(state.audit_every, commit.step, commit.then == "end")
    return (Audit(commit.step, slots),) if is_asked and slots else ()


def suspects(state: WorkerState, failure: inputs.TransferFailed) -> Stepped:
    """Reports a failed transfer, and waits for the verdict."""
    said = messages.SuspicionMessage(state.epoch, failure.text, failure.peer)
    return state._replace(mode=Mode.SUSPECTING), (Say(said),)


def leaves(state: WorkerState, told: Message) -> Stepped:
    """Ends at the word that every worker has finished: no transfer is open."""
    return state._replace(mode=Mode.OUT), (CloseGroup(), End(ExitCode.OK))


def is_let_go(state: WorkerState, told: Message) -> Stepped:
    """Ends the wait of a worker that is no member: all have finished, or it has given notice."""
    code = ExitCode.LEFT_WITH_NOTICE if state.has_given_notice else ExitCode.OK
    return state._replace(mode=Mode.OUT), (End(code),)


def stops(state: WorkerState, told: Message) -> Stepped:
    """Ends at once."""
    return state._replace(mode=Mode.OUT), (End(ExitCode.OK),)
