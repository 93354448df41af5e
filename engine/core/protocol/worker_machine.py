"""The worker machine: `step(state, input) -> (state, outputs)`, a pure function given by one table.

    BOUNDARY --epoch--> FROZEN --plan--> PLANNED --go--> RUNNING --> VOTED --commit--> RUNNING ... --> DONE
       ^                  any mode --newer epoch--> FROZEN        VALIDATING: between two steps
       '--commit that begins an epoch--          any mode --failed transfer--> SUSPECTING --newer epoch--> FROZEN
    WAITING --epoch that has it as a member--> FROZEN

Rules: the rule for an input is `TABLE[mode, type of input]`, of a message `TABLE[mode, type of message]`. A newer epoch
ends every wait; what the worker then holds decides, not what it was about to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.core import messages
from engine.core.checkpoint_rules import shares_of
from engine.core.errors import ExitCode, Impossible, InvariantError, ensure, required
from engine.core.job.job import is_due
from engine.core.message_kinds import Message
from engine.core.messages import (
    ByeMessage,
    CommitMessage,
    EpochMessage,
    GoMessage,
    NextGroupFormedMessage,
    NextGroupMessage,
    NoticeMessage,
    StopMessage,
    ValidatedMessage,
)
from engine.core.ownership import Ownership, Slot
from engine.core.program.inventory import (
    InventoryMessage,
    PlanMessage,
    PlannedMessage,
    PlanPartMessage,
    PreparedMessage,
    PrepareMessage,
    PreparePartMessage,
    WholePlanMessage,
)
from engine.core.program.plan_parts import document_of, first_grid, grid_of
from engine.core.protocol import worker_inputs as inputs
from engine.core.protocol.worker_inputs import GroupKey, NextGroupFormed
from engine.core.protocol.worker_state import (
    Adopt,
    Audit,
    BeginAt,
    CatchUp,
    CloseGroup,
    CountHeld,
    Drop,
    End,
    Enter,
    EnterNextGroup,
    FormGroup,
    FormNextGroup,
    Keep,
    KeepLast,
    LeaveGroup,
    LeaveNextGroups,
    LoadPlan,
    MakePlan,
    MarkPhase,
    Mode,
    Output,
    PlanNextStep,
    PreparePlan,
    ReleaseSends,
    ReportDone,
    Run,
    SendMessage,
    TakeNextStep,
    TakeStep,
    Validate,
    WorkerState,
)

# The rules of the worker machine from the begin of a step to the end of the job, and those of all modes.
#
# A broken transfer is only a suspicion: the worker reports it, and the next epoch has the verdict. No worker begins the
# next step before the result of a validation: until then it can be redone.

Stepped = tuple[WorkerState, tuple[Output, ...]]


def changes_nothing(state: WorkerState, given: Any) -> Stepped:
    """Ignores an input that comes late, or twice."""
    return state, ()


def joins(state: WorkerState, built: inputs.StagesBuilt) -> Stepped:
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
    return new, (SendMessage(messages.WaitingMessage(built.joins) if built.waits else messages.ReadyMessage()),)


def gives_notice(state: WorkerState, given: inputs.NoticeReceived) -> Stepped:
    """Tells the agent of the notice; once is enough."""
    if state.has_given_notice:
        return state, ()
    return state._replace(has_given_notice=True), (SendMessage(NoticeMessage()),)


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
    outputs: tuple[Output, ...] = (Enter(ownership, new.schedule),)
    if made.is_healing:
        outputs = (*outputs, plan_next_step(new))
    return go_on(new, outputs)


def plan_next_step(state: WorkerState) -> PlanNextStep:
    """Returns the order to make the program of the step after the one that is about to begin."""
    given = (state.members, state.leaving, state.wanted, state.hosts, state.schedule)
    return PlanNextStep(state.step, state.ownership, *given)


def has_passed(state: WorkerState, ended: inputs.PassEnded) -> Stepped:
    """Reports the result of the validation pass, if it is here."""
    if ended.sets is None:
        return state, ()
    return state, (SendMessage(messages.ValidationMessage(state.step - 1, ended.sets)),)


def is_validated(state: WorkerState, result: messages.ValidatedMessage) -> Stepped:
    """Goes on after the validation of the last step."""
    return go_on(state, ()) if result.step == state.step - 1 else (state, ())


def keeps(state: WorkerState, before: tuple[Output, ...]) -> Stepped:
    """Writes this worker's share of the state after the last step, as far as that has not begun."""
    shares = shares_of(state.ownership, state.worker)
    new = tuple(each for each in shares if each.slot not in state.kept)
    if not new:
        return state, before
    return state._replace(kept=(*state.kept, *(each.slot for each in new))), (*before, Keep(state.step - 1, new))


def audit(state: WorkerState, commit: messages.CommitMessage, slots: tuple[Slot, ...]) -> tuple[Output, ...]:
    """Returns the order to send the hashes of these slots, if an audit is due after the step."""
    is_asked = commit.keep or is_due(state.audit_every, commit.step, commit.then == "end")
    return (Audit(commit.step, slots),) if is_asked and slots else ()


def suspects(state: WorkerState, failure: inputs.TransferFailed) -> Stepped:
    """Reports a failed transfer, and waits for the verdict."""
    report = messages.SuspicionMessage(state.epoch, failure.text, failure.peer)
    return state._replace(mode=Mode.SUSPECTING), (SendMessage(report),)


def leaves(state: WorkerState, bye: Message) -> Stepped:
    """Ends when told that every worker has finished: no transfer is open."""
    return state._replace(mode=Mode.OUT), (CloseGroup(), End(ExitCode.OK))


def is_let_go(state: WorkerState, bye: Message) -> Stepped:
    """Ends the wait of a worker that is no member: all have finished, or it has given notice."""
    code = ExitCode.LEFT_WITH_NOTICE if state.has_given_notice else ExitCode.OK
    return state._replace(mode=Mode.OUT), (End(code),)


def stops(state: WorkerState, stop: messages.StopMessage) -> Stepped:
    """Ends at once, or once its share of the last committed step is written, if it has taken that step."""
    new = state._replace(mode=Mode.OUT)
    if stop.keep < 0 or stop.keep != state.step - 1:
        return new, (End(ExitCode.OK),)
    shares = shares_of(Ownership(state.ownership.grid, stop.owners), state.worker) if stop.owners else ()
    mine = tuple(each for each in shares if each.slot not in state.kept)
    return new, (KeepLast(stop.keep, mine), End(ExitCode.OK))


# The rules of the worker machine for the group of a coming epoch, which is formed while training continues.
#
#     NextGroupMessage -> forms it in a thread -> NextGroupFormedMessage
#     EpochMessage that names it -> leaves the present group and enters it, at a step boundary
#     any other epoch, or another attempt -> gives it up
#
# Rule: a group belongs to one epoch and one attempt, and is entered with the epoch that names both, or never.


def forms(state: WorkerState, order: NextGroupMessage) -> Stepped:
    """Begins to form a group, and gives up the attempts before it for the same epoch; a late order changes nothing.

    The main thread may still have to enter the group of an epoch before.
    """
    key = GroupKey(order.epoch, order.number)
    if order.epoch <= state.epoch or any(each.epoch > key.epoch for each in state.next_groups):
        return state, ()
    gone = tuple(each for each in state.next_groups if each.epoch == key.epoch)
    if key in gone and state.worker in order.members:
        return state, ()  # a repeated order
    kept = {each: is_formed for each, is_formed in state.next_groups.items() if each not in gone}
    outputs: tuple[Output, ...] = (LeaveNextGroups(gone),) if gone else ()
    if state.worker not in order.members:
        return state._replace(next_groups=kept), outputs
    return state._replace(next_groups={**kept, key: False}), (*outputs, FormNextGroup(order))


def is_next_formed(state: WorkerState, formed: NextGroupFormed) -> Stepped:
    """Reports the group, or why it failed, to the coordinator; an attempt that was given up changes nothing."""
    key = formed.key
    if key not in state.next_groups:
        return state, ()
    report = SendMessage(NextGroupFormedMessage(key.epoch, key.number, formed.failure))
    if not formed.failure:
        return state._replace(next_groups={**state.next_groups, key: True}), (report,)
    kept = {each: is_formed for each, is_formed in state.next_groups.items() if each != key}
    return state._replace(next_groups=kept), (LeaveNextGroups((key,)), report)


def changes_group(state: WorkerState, epoch: EpochMessage) -> Stepped:
    """Enters the group that an epoch names; gives up all others that are not of a later epoch."""
    key = GroupKey(epoch.epoch, epoch.group)
    if epoch.group:
        here = f"worker {state.worker} has {dict(state.next_groups)}"
        ensure(state.next_groups.get(key, False), f"epoch {epoch.epoch} enters group {epoch.group}, and {here}")
    if not state.next_groups:
        return state, ()
    if epoch.group:
        state = state._replace(forming=0, failure=None)
    gone = tuple(each for each in state.next_groups if each.epoch <= epoch.epoch and each != key)
    outputs: tuple[Output, ...] = (LeaveNextGroups(gone),) if gone else ()
    if epoch.group:
        outputs = (*outputs, EnterNextGroup(key))
    later = {each: is_formed for each, is_formed in state.next_groups.items() if each.epoch > epoch.epoch}
    return state._replace(next_groups=later), outputs


# The rules of the worker machine from an epoch to the begin of training in it.
#
#     EpochMessage ->  FROZEN     counts its inventory                                 -> InventoryMessage
#     PlanMessage ->              makes the plan; takes the last commit, if it missed it  -> PlannedMessage
#                      PLANNED    adopts the slots that it now owns, drops other replicas
#     GoMessage ->     RUNNING    the rest of the open step by the plan, when the group is formed
#
# Rules: from its inventory to the plan or a newer epoch, a worker takes no step and no commit. A prepared epoch begins
# with a commit and names a plan that every member made in advance, from the inventories after that commit; a worker
# with another inventory stops.


def enters(state: WorkerState, epoch: messages.EpochMessage) -> Stepped:
    """Enters a newer epoch, or leaves if this worker is not a member of it."""
    if epoch.epoch <= state.epoch:
        return state, ()
    if state.worker not in epoch.members:
        code = ExitCode.LEFT_WITH_NOTICE if state.has_given_notice else ExitCode.FENCED
        return state._replace(mode=Mode.OUT, epoch=epoch.epoch), (End(code),)
    new = state._replace(mode=Mode.FROZEN, epoch=epoch.epoch, message=epoch, plan=None, go=None)
    new, changed = changes_group(new, epoch)
    fenced: tuple[Output, ...] = (MarkPhase("fence"), *changed)
    missed = epoch.commit is not None and epoch.commit.step >= state.step
    if missed:
        fenced = (*fenced, Drop(state.held))  # a replica without a part in the step cannot catch up
    if epoch.commit is not None and missed and not state.held:  # the others do not wait for a worker without replicas
        new = new._replace(step=epoch.commit.step + 1, kept=())
        fenced = (*fenced, BeginAt(new.step))
    if epoch.gather:
        return new, (*fenced, CountHeld())
    if epoch.digest is not None:
        return _takes_prepared(new, epoch, fenced)
    first = first_grid(epoch.epoch, epoch.members, state.ownership, epoch.hosts)
    new = new._replace(mode=Mode.PLANNED, known=(first,))
    return (new, ()) if epoch.go is None else goes(new, epoch.go)


def joins_epoch(state: WorkerState, epoch: messages.EpochMessage) -> Stepped:
    """Enters an epoch that has this waiting worker as a member; any other changes nothing."""
    return enters(state, epoch) if state.worker in epoch.members else (state, ())


def gives_up_joining(state: WorkerState, epoch: messages.EpochMessage) -> Stepped:
    """Ends: a worker that has not joined holds nothing that the others could use."""
    return state._replace(mode=Mode.OUT, epoch=epoch.epoch), (End(ExitCode.NOT_RECOVERED),)


def _takes_prepared(state: WorkerState, epoch: messages.EpochMessage, before: tuple[Output, ...]) -> Stepped:
    plan = next((each for each in state.prepared if each.document.epoch == epoch.epoch), None)
    digest = None if plan is None else plan.plan.digest
    if plan is None or digest != epoch.digest:
        here = f"worker {state.worker} has prepared {digest}"
        raise InvariantError(f"epoch {epoch.epoch} has plan {epoch.digest}, {here}")
    return _follows(state._replace(plan=plan), epoch.commit, before)


def is_counted(state: WorkerState, counted: inputs.InventoryCounted) -> Stepped:
    """Sends the inventory; in a prepared epoch compares it with the one that the plan was made from."""
    message = required(state.message, "a frozen worker is in an epoch")
    if message.gather:
        reports = (SendMessage(InventoryMessage(state.epoch, counted.holds, counted.whole)), MarkPhase("inventory"))
        if not message.regroup:
            return state, reports
        return state._replace(forming=state.epoch, failure=None), (*reports, LeaveGroup(), FormGroup(message))
    plan = required(state.plan, "a prepared epoch has a plan")
    if (state.worker, counted.holds) not in plan.document.inventories:
        here = f"worker {state.worker} holds {counted.holds}"
        raise InvariantError(f"{here}, another inventory than in epoch {state.epoch}")
    new, outputs = _takes_over(state, ())
    if message.go is None:
        return new, outputs
    begun, more = goes(new, message.go)
    return begun, (*outputs, *more)


def plans(state: WorkerState, message: PlanMessage | PlanPartMessage) -> Stepped:
    """Makes the plan of this epoch, or asks for the whole; that of another one, or a second one, changes nothing."""
    if message.epoch != state.epoch or state.plan is not None:
        return state, ()
    if isinstance(message, PlanMessage):
        return state, (MakePlan(message),)
    document = document_of(message, state.known, state.worker, state.ownership.grid)
    if document is None:
        return state, (SendMessage(WholePlanMessage(state.epoch)),)
    known = tuple(each for each in state.known if each.epoch == message.change.base)
    return state._replace(known=known), (MakePlan(document),)


def is_planned(state: WorkerState, made: inputs.PlanMade) -> Stepped:
    """Follows the plan that was made, as soon as this worker has caught up."""
    message = required(state.message, "a frozen worker is in an epoch")
    return _follows(state._replace(plan=made.plan), message.commit, ())


def _follows(state: WorkerState, commit: messages.CommitMessage | None, before: tuple[Output, ...]) -> Stepped:
    """Takes the plan's ownership, and the last commit if missed; raises InvariantError if it missed an earlier one."""
    document, ownership, _ = required(state.plan, "this worker has made the plan")
    new = state._replace(
        ownership=ownership,
        held=ownership.held_by(state.worker),
        members=document.members,
        leaving=document.leaving,
        wanted=document.wanted,
        hosts=document.hosts,
        schedule=document.schedule,
        known=(*state.known[-1:], grid_of(document)),
    )
    if commit is not None and commit.step >= state.step:
        here = f"worker {state.worker} is at {state.step}"
        ensure(commit.step == state.step, f"step {commit.step} is committed, and {here}")
        return new, (*before, CatchUp(commit))
    return _caught_up(new, before)


def catches_up(state: WorkerState, taken: inputs.StepTaken) -> Stepped:
    """Goes on with the plan after the commit that this worker had missed."""
    audits = () if state.ownership.grid.fsdp else audit(state, taken.commit, state.held)
    return _caught_up(state._replace(step=state.step + 1, kept=()), audits)


def _caught_up(state: WorkerState, before: tuple[Output, ...]) -> Stepped:
    """Answers the plan; in a prepared epoch, which has its answer, counts the inventory."""
    epoch, made = required(state.message, "an epoch is entered"), required(state.plan, "a plan is made")
    if not epoch.gather:
        return state, (*before, CountHeld())
    answer = PlannedMessage(state.epoch, made.plan.digest, made.plan.lost_stages)
    return _takes_over(state, (*before, SendMessage(answer)))


def _takes_over(state: WorkerState, before: tuple[Output, ...]) -> Stepped:
    epoch, made = required(state.message, "an epoch is entered"), required(state.plan, "a plan is made")
    new = state._replace(mode=Mode.PLANNED)
    mark = MarkPhase("plan", made.plan.adopted)
    if made.plan.lost_stages:
        return new, (*before, mark)
    mine = tuple(slot for slot in made.plan.adopted if made.ownership.owner(*slot) == state.worker)
    audits = () if epoch.commit is None else audit(state, epoch.commit, mine)
    return new, (*before, *((Adopt(mine),) if mine else ()), *audits, Drop(state.held), mark, LoadPlan(made))


def is_formed(state: WorkerState, formed: inputs.GroupFormed) -> Stepped:
    """Begins the work that waited for the group; a failure is reported when training begins, no earlier."""
    if formed.epoch != state.forming:
        return state, ()
    return _goes_now(state._replace(forming=0, failure=formed.failure))


def goes(state: WorkerState, go: messages.GoMessage) -> Stepped:
    """Begins to train in the epoch, or ends training in it, as soon as the group is formed."""
    if state.go is not None:
        return state, ()
    return _goes_now(state._replace(go=go))


def _goes_now(state: WorkerState) -> Stepped:
    if state.mode is not Mode.PLANNED or state.go is None or state.forming:
        return state, ()
    if state.failure is not None:
        return suspects(state, state.failure)
    new = state._replace(program="usual" if state.plan is None else "plan", opens=False, is_over=state.go.end)
    outputs: tuple[Output, ...] = (Enter(new.ownership, new.schedule),)
    if new.plan is not None and not new.is_over:
        outputs = (*outputs, plan_next_step(new))
    if state.go.keep:
        new, outputs = keeps(new, outputs)
    if (
        new.ownership.grid.fsdp
        and new.plan is not None
        and (commit := required(new.message, "an epoch is entered").commit)
    ):
        outputs = (*outputs, *audit(new, commit, new.held))
    if state.go.validate:
        return new._replace(mode=Mode.VALIDATING), (*outputs, Validate(new.step - 1, new.ownership))
    return go_on(new, outputs)


def prepares(state: WorkerState, order: PrepareMessage | PreparePartMessage) -> Stepped:
    """Makes the plan of a coming epoch, if this worker is a member of it, or asks for the whole.

    The main thread may not have entered the epoch before, whose plan was prepared too.
    """
    if isinstance(order, PrepareMessage):
        return state, (PreparePlan(order),) if state.worker in order.plan.members else ()
    known = (*state.known, *(grid_of(plan.document) for plan in state.prepared))
    document = document_of(order.part, known, state.worker, state.ownership.grid)
    if document is None:
        return state, (SendMessage(WholePlanMessage(order.part.epoch)),)
    mine = replace(document, inventories=((state.worker, order.holds),))
    return state, (PreparePlan(PrepareMessage(order.number, mine)),)


def is_prepared(state: WorkerState, prepared: inputs.PlanPrepared) -> Stepped:
    """Keeps and answers the plan of a coming epoch; for each epoch the latest one counts."""
    epoch = prepared.plan.document.epoch
    # The main thread may still need the one before.
    kept = tuple(each for each in state.prepared if each.document.epoch == epoch - 1)
    answer = PreparedMessage(epoch, prepared.number, prepared.plan.plan.digest)
    return state._replace(prepared=(*kept, prepared.plan)), (SendMessage(answer),)


WorkerRule = Callable[[WorkerState, Any], Stepped]

_UNJOINED = Impossible("the worker has not joined")
_JOINED = Impossible("a worker joins once")
_UNPLANNED = Impossible("training continues when every member has made the plan")
_AT_WORK = Impossible("a message that does not interrupt waits until the program has ended")
_UNASKED = Impossible("the main thread was not asked for this")
_LATE = changes_nothing  # it repeats a message that has been obeyed
_FIXED = changes_nothing  # an inventory freezes its worker: not even a commit is accepted
_DEAF = changes_nothing  # a worker that suspects waits for the next epoch
_OUT = changes_nothing
_PUT_OUT = changes_nothing  # before the worker heard that it was a member; it hears of the epochs of the others
_NO_MEMBER = Impossible("an epoch makes a waiting worker a member before anything else is asked of it")

# before the worker has joined, and after it
_ALWAYS: dict[type[Message] | type[inputs.Input], tuple[WorkerRule | Impossible, WorkerRule | Impossible]] = {
    EpochMessage: (gives_up_joining, enters),
    StopMessage: (stops, stops),
    inputs.NoticeReceived: (gives_notice, gives_notice),
    inputs.StagesBuilt: (joins, _JOINED),
    PrepareMessage: (_UNJOINED, prepares),
    PreparePartMessage: (_UNJOINED, prepares),
    NextGroupMessage: (_UNJOINED, forms),
    inputs.NextGroupFormed: (_UNJOINED, is_next_formed),
    inputs.PlanPrepared: (_UNJOINED, is_prepared),
    inputs.GroupFormed: (_UNJOINED, is_formed),
}
_TRAINING = (*Mode,)[2:-1]
# fmt: off
_SOMETIMES: dict[type[Message] | type[inputs.Input], tuple[WorkerRule | Impossible, ...]] = {
    #                         boundary  frozen      planned   running   voted       validating    suspecting  done
    PlanMessage:             (_LATE,    plans,      _LATE,    _AT_WORK, _LATE,      _LATE,        _DEAF,      _LATE),
    PlanPartMessage:         (_LATE,    plans,      _LATE,    _AT_WORK, _LATE,      _LATE,        _DEAF,      _LATE),
    GoMessage:               (_LATE,    _UNPLANNED, goes,     _AT_WORK, _LATE,      _LATE,        _DEAF,      _LATE),
    CommitMessage:           (is_known, _FIXED,     is_known, _AT_WORK, takes_step, is_known,     _DEAF,      is_known),
    ValidatedMessage:        (_LATE,    _LATE,      _LATE,    _AT_WORK, _LATE,      is_validated, _DEAF,      _LATE),
    ByeMessage:              (_LATE,    _LATE,      _LATE,    _AT_WORK, _LATE,      _LATE,        _DEAF,      leaves),
    inputs.TransferFailed:   (suspects, suspects,   suspects, suspects, suspects,   suspects,     _DEAF,      suspects),
}
# fmt: on
_WHILE_WAITING: dict[type[Message] | type[inputs.Input], WorkerRule] = {
    EpochMessage: joins_epoch,
    StopMessage: stops,
    ByeMessage: is_let_go,
    CommitMessage: changes_nothing,  # it comes again with the epoch that it begins
    PlanMessage: _PUT_OUT,
    PlanPartMessage: _PUT_OUT,
    GoMessage: _PUT_OUT,
    ValidatedMessage: _PUT_OUT,
    inputs.NoticeReceived: gives_notice,
    PrepareMessage: prepares,
    PreparePartMessage: prepares,
    inputs.PlanPrepared: is_prepared,
    NextGroupMessage: forms,
    inputs.NextGroupFormed: is_next_formed,
}
_ANSWERS: dict[type[inputs.Input], dict[Mode, WorkerRule]] = {
    inputs.InventoryCounted: {Mode.FROZEN: is_counted},
    inputs.PlanMade: {Mode.FROZEN: is_planned},
    inputs.StepTaken: {Mode.FROZEN: catches_up, Mode.VOTED: opens_step},
    inputs.NextStepMade: {Mode.VOTED: heals},
    inputs.ProgramEnded: {Mode.RUNNING: has_run},
    inputs.PassEnded: {Mode.VALIDATING: has_passed},
}

KINDS: tuple[type[Message] | type[inputs.Input], ...] = (*_ALWAYS, *_SOMETIMES, *_ANSWERS)
TABLE: dict[tuple[Mode, type[Message] | type[inputs.Input]], WorkerRule | Impossible] = {
    **{(Mode.JOINING, kind): _UNJOINED for kind in _SOMETIMES},
    **{(mode, kind): _UNASKED for kind in _ANSWERS for mode in Mode},
    **{(Mode.JOINING, kind): before for kind, (before, _) in _ALWAYS.items()},
    **{(mode, kind): after for kind, (_, after) in _ALWAYS.items() for mode in _TRAINING},
    **{(mode, kind): cell for kind, row in _SOMETIMES.items() for mode, cell in zip(_TRAINING, row, strict=True)},
    **{(mode, kind): rule for kind, row in _ANSWERS.items() for mode, rule in row.items()},
    **{(Mode.WAITING, kind): _NO_MEMBER for kind in KINDS},
    **{(Mode.WAITING, kind): rule for kind, rule in _WHILE_WAITING.items()},
    **{(Mode.OUT, kind): _OUT for kind in KINDS},
}


def step(state: WorkerState, given: inputs.Input) -> Stepped:
    """Returns the state after an input, and the outputs to carry out.

    Raises InvariantError if the input is impossible in this mode, or contradicts what this worker holds.
    """
    about: Any = given.message if isinstance(given, inputs.ProtocolMessage) else given
    cell = TABLE[state.mode, type(about)]
    if isinstance(cell, Impossible):
        raise InvariantError(f"{type(about).__name__} at worker {state.worker} while {state.mode}: {cell.reason}")
    return cell(state, about)
