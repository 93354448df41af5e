"""The rules of the worker machine from an epoch to the begin of training in it.

    EpochMessage ->  FROZEN     counts its inventory                                 -> InventoryMessage
    PlanMessage ->              makes the plan; takes the last commit, if it missed it  -> PlannedMessage
                     PLANNED    adopts the slots that it now owns, drops other replicas
    GoMessage ->     RUNNING    the rest of the open step by the plan, when the group is formed

Rules: from its inventory to the plan or a newer epoch, a worker takes no step and no commit. A prepared epoch begins
with a commit and names a plan that every member has made in advance, from the inventories after that commit. No
inventory is sent, and a worker with another inventory stops.
"""

from __future__ import annotations

from engine.core import messages
from engine.core.errors import ExitCode, InvariantError, ensure, required
from engine.core.recovery.plan_messages import (
    InventoryMessage,
    PlanMessage,
    PlannedMessage,
    PreparedMessage,
    PrepareMessage,
)
from engine.core.worker import inputs
from engine.core.worker.next_groups import changes_group
from engine.core.worker.outputs import (
    Adopt,
    BeginAt,
    CatchUp,
    CountHeld,
    Drop,
    End,
    Enter,
    FormGroup,
    LeaveGroup,
    LoadPlan,
    MakePlan,
    MarkPhase,
    Output,
    PlanNextStep,
    PreparePlan,
    Say,
    Validate,
)
from engine.core.worker.state import Mode, WorkerState
from engine.core.worker.step_rules import Stepped, audit, go_on, keeps, suspects


def enters(state: WorkerState, epoch: messages.EpochMessage) -> Stepped:
    """Enters a newer epoch, or leaves if this worker is not a member of it."""
    if epoch.epoch <= state.epoch:
        return state, ()
    if state.worker not in epoch.members:
        code = ExitCode.LEFT_WITH_NOTICE if state.has_given_notice else ExitCode.FENCED
        return state._replace(mode=Mode.OUT, epoch=epoch.epoch), (End(code),)
    new = state._replace(mode=Mode.FROZEN, epoch=epoch.epoch, told=epoch, plan=None, go=None)
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
    new = new._replace(mode=Mode.PLANNED)  # the first epoch
    return (new, ()) if epoch.go is None else goes(new, epoch.go)


def is_taken_in(state: WorkerState, epoch: messages.EpochMessage) -> Stepped:
    """Enters an epoch that has this waiting worker as a member; any other changes nothing."""
    return enters(state, epoch) if state.worker in epoch.members else (state, ())


def gives_up_joining(state: WorkerState, epoch: messages.EpochMessage) -> Stepped:
    """Ends: a worker that has not joined holds nothing that the others could use."""
    return state._replace(mode=Mode.OUT, epoch=epoch.epoch), (End(ExitCode.NOT_RECOVERED),)


def _takes_prepared(state: WorkerState, epoch: messages.EpochMessage, before: tuple[Output, ...]) -> Stepped:
    plan = next((each for each in state.prepared if each.told.epoch == epoch.epoch), None)
    digest = None if plan is None else plan.plan.digest
    if plan is None or digest != epoch.digest:
        found = f"worker {state.worker} has prepared {digest}"
        raise InvariantError(f"epoch {epoch.epoch} has plan {epoch.digest}, {found}")
    return _follows(state._replace(plan=plan), epoch.commit, before)


def is_counted(state: WorkerState, counted: inputs.Counted) -> Stepped:
    """Sends the inventory; in a prepared epoch compares it with the one that the plan was made from."""
    told = required(state.told, "a frozen worker is in an epoch")
    if told.gather:
        said = (Say(InventoryMessage(state.epoch, counted.holds, counted.whole)), MarkPhase("inventory"))
        if not told.regroup:
            return state, said
        return state._replace(forming=state.epoch, failure=None), (*said, LeaveGroup(), FormGroup(told))
    plan = required(state.plan, "a prepared epoch has a plan")
    if (state.worker, counted.holds) not in plan.told.inventories:
        found = f"worker {state.worker} holds {counted.holds}"
        raise InvariantError(f"{found}, another inventory than in epoch {state.epoch}")
    new, outputs = _takes_over(state, ())
    if told.go is None:
        return new, outputs
    begun, more = goes(new, told.go)
    return begun, (*outputs, *more)


def plans(state: WorkerState, told: PlanMessage) -> Stepped:
    """Makes the plan of this epoch; that of another one, or a second one, changes nothing."""
    if told.epoch != state.epoch or state.plan is not None:
        return state, ()
    return state, (MakePlan(told),)


def is_planned(state: WorkerState, made: inputs.PlanMade) -> Stepped:
    """Follows the plan that was made, as soon as this worker has caught up."""
    told = required(state.told, "a frozen worker is in an epoch")
    return _follows(state._replace(plan=made.plan), told.commit, ())


def _follows(state: WorkerState, commit: messages.CommitMessage | None, before: tuple[Output, ...]) -> Stepped:
    """Takes the ownership of the plan, and the last commit if this worker has missed it.

    Raises InvariantError if it has missed an earlier one.
    """
    told, ownership, _ = required(state.plan, "this worker has made the plan")
    new = state._replace(
        ownership=ownership,
        held=ownership.held_by(state.worker),
        members=told.members,
        leaving=told.leaving,
        wanted=told.wanted,
        hosts=told.hosts,
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
    epoch, made = required(state.told, "an epoch is entered"), required(state.plan, "a plan is made")
    if not epoch.gather:
        return state, (*before, CountHeld())
    answer = PlannedMessage(state.epoch, made.plan.digest, made.plan.lost_stages)
    return _takes_over(state, (*before, Say(answer)))


def _takes_over(state: WorkerState, before: tuple[Output, ...]) -> Stepped:
    """Takes over slots as the plan says, unless a stage is lost."""
    epoch, made = required(state.told, "an epoch is entered"), required(state.plan, "a plan is made")
    new = state._replace(mode=Mode.PLANNED)
    mark = MarkPhase("plan", made.plan.adopted)
    if made.plan.lost_stages:
        return new, (*before, mark)
    mine = tuple(slot for slot in made.plan.adopted if made.ownership.owner(*slot) == state.worker)
    audits = () if epoch.commit is None else audit(state, epoch.commit, mine)
    return new, (*before, *((Adopt(mine),) if mine else ()), *audits, Drop(state.held), mark, LoadPlan(made))


def is_formed(state: WorkerState, formed: inputs.GroupFormed) -> Stepped:
    """Begins what has waited for the group; an attempt that was given up changes nothing.

    Reports a failure, but not before training begins: until then the worker can still answer.
    """
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
    outputs: tuple[Output, ...] = (Enter(new.ownership),)
    if new.plan is not None and not new.is_over:
        outputs = (*outputs, PlanNextStep(new.step, new.ownership, new.members, new.leaving, new.wanted, new.hosts))
    if state.go.keep:
        new, outputs = keeps(new, outputs)
    if (
        new.ownership.grid.fsdp
        and new.plan is not None
        and (commit := required(new.told, "an epoch is entered").commit)
    ):
        outputs = (*outputs, *audit(new, commit, new.held))
    if state.go.validate:
        return new._replace(mode=Mode.VALIDATING), (*outputs, Validate(new.step - 1, new.ownership))
    return go_on(new, outputs)


def prepares(state: WorkerState, told: PrepareMessage) -> Stepped:
    """Makes the plan of a coming epoch, if this worker is a member of it."""
    return state, (PreparePlan(told),) if state.worker in told.plan.members else ()


def is_prepared(state: WorkerState, prepared: inputs.PlanPrepared) -> Stepped:
    """Keeps and answers the plan of a coming epoch; for each epoch the latest one counts."""
    epoch = prepared.plan.told.epoch
    kept = tuple(each for each in state.prepared if each.told.epoch == epoch - 1)  # the main thread may still need it
    answer = PreparedMessage(epoch, prepared.number, prepared.plan.plan.digest)
    return state._replace(prepared=(*kept, prepared.plan)), (Say(answer),)
