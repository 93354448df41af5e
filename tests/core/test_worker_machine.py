"""The worker machine: its table cell by cell, then the life of a worker, output by output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.core.checkpoint_rules import StateShare
from engine.core.errors import ExitCode, Impossible, InvariantError
from engine.core.messages import (
    ByeMessage,
    CommitMessage,
    EpochMessage,
    Evaluation,
    GoMessage,
    NextGroupMessage,
    NoticeMessage,
    ReadyMessage,
    StopMessage,
    SuspicionMessage,
    ValidatedMessage,
    ValidationMessage,
    WaitingMessage,
)
from engine.core.ownership import Grid, Members, Ownership
from engine.core.program.inventory import (
    GridChange,
    InventoryMessage,
    PlanMessage,
    PlannedMessage,
    PlanPartMessage,
    PreparedMessage,
    PrepareMessage,
    PreparePartMessage,
    ProgramRest,
    Repair,
    WholePlanMessage,
)
from engine.core.program.plan_parts import first_grid, grid_of, parts_of
from engine.core.program.planner import EpochPlan, Plan
from engine.core.protocol.worker_inputs import (
    GroupFormed,
    GroupKey,
    Inbox,
    Input,
    InventoryCounted,
    NextGroupFormed,
    NextStepMade,
    NoticeReceived,
    PassEnded,
    PlanMade,
    PlanPrepared,
    ProgramEnded,
    ProtocolMessage,
    StagesBuilt,
    StepTaken,
    TransferFailed,
    arrived,
    taken,
)
from engine.core.protocol.worker_machine import KINDS, TABLE, changes_nothing, step
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
    FormGroup,
    Keep,
    KeepLast,
    LeaveGroup,
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
from tests.looped import looped

GRID = Grid(2, 4)
MEASURED = (Evaluation("validation", 32, 1.5, {"accuracy": 0.25}),)
WHOLE = Ownership(GRID, (0, 1), ((1,), (0,)))  # worker 0 owns stage 0 and shadows stage 1
ALONE = Ownership(GRID, (0, 0), ((), ()))
HELD = ((0, 0), (0, 1))
HOLDS = "what worker 0 holds"
GO = GoMessage(end=False, validate=False)
SAME = GridChange(1, (), (), (), (), (), "")
PART = PlanPartMessage(2, 2, (), SAME, Repair((), (), (), (), ()), "digest", ends=False)
FAILED = TransferFailed("it broke", 1)


def commit(number: int, then: Any = "step") -> CommitMessage:
    return CommitMessage(number, 0.5, then)


def epoch(number: int, **fields: Any) -> EpochMessage:
    values = {"gather": True, "regroup": True, "commit": None, "digest": None, "go": None, "members": (0, 1), **fields}
    return EpochMessage(number, **{**values, "members": Members.of(values["members"])})


def first_epoch() -> EpochMessage:
    return epoch(1, gather=False, regroup=False, go=GO)


def document(number: int, committed: int) -> PlanMessage:
    return PlanMessage(number, committed, (0, 1), (), ALONE.owners, ALONE.shadows, ((0, HOLDS), (1, "other")))


def plan(number: int, committed: int, lost: tuple[int, ...] = (), adopted: Any = ()) -> EpochPlan:
    return EpochPlan(document(number, committed), ALONE, Plan(committed + 1, {}, adopted, lost, f"digest {number}"))


def fed(state: WorkerState, *given: Input) -> WorkerState:
    for each in given:
        state, _ = step(state, each)
    return state


def joined(validate_every: int = 0, audit_every: int = 0) -> WorkerState:
    return fed(WorkerState(), StagesBuilt(0, WHOLE, validate_every, audit_every))


def waiting() -> WorkerState:
    return fed(WorkerState(), StagesBuilt(2, WHOLE, 0, 0, waits=True))


def running(number: int = 0, **periods: int) -> WorkerState:
    """Returns a worker in epoch 1 that runs step `number`."""
    return fed(joined(**periods), ProtocolMessage(first_epoch()))._replace(step=number)


def voted(number: int = 0, **periods: int) -> WorkerState:
    return fed(running(number, **periods), ProgramEnded())


def planned(number: int = 3) -> WorkerState:
    """Returns a worker that has answered the plan of epoch 2 in step `number`, and forms a group."""
    return fed(
        running(number),
        ProtocolMessage(epoch(2, commit=commit(number - 1))),
        InventoryCounted(HOLDS, (0, 1)),
        ProtocolMessage(document(2, number - 1)),
        PlanMade(plan(2, number - 1)),
    )


def recovering(number: int = 3) -> WorkerState:
    """Returns a worker that runs the plan of epoch 2."""
    return fed(planned(number), GroupFormed(2), ProtocolMessage(GO))


def in_mode(mode: Mode) -> WorkerState:
    return {
        Mode.JOINING: WorkerState(),
        Mode.WAITING: waiting(),
        Mode.BOUNDARY: joined()._replace(step=3),
        Mode.FROZEN: fed(running(3), ProtocolMessage(epoch(2, commit=commit(2)))),
        Mode.PLANNED: planned(),
        Mode.RUNNING: running(3),
        Mode.VOTED: voted(3),
        Mode.VALIDATING: fed(voted(3, validate_every=1), ProtocolMessage(commit(3)), StepTaken(commit(3))),
        Mode.SUSPECTING: fed(running(3), FAILED),
        Mode.DONE: fed(voted(3), ProtocolMessage(commit(3, "end")), StepTaken(commit(3, "end"))),
        Mode.OUT: fed(running(3), ProtocolMessage(StopMessage())),
    }[mode]


SAMPLES: dict[type, Input] = {
    EpochMessage: ProtocolMessage(epoch(3)),
    StopMessage: ProtocolMessage(StopMessage()),
    NoticeReceived: NoticeReceived(),
    StagesBuilt: StagesBuilt(0, WHOLE, 0, 0),
    PrepareMessage: ProtocolMessage(PrepareMessage(7, document(3, 3))),
    PreparePartMessage: ProtocolMessage(PreparePartMessage(7, PART, HOLDS)),
    PlanPrepared: PlanPrepared(7, plan(3, 3)),
    GroupFormed: GroupFormed(2),
    NextGroupMessage: ProtocolMessage(NextGroupMessage(3, 1, (0, 1, 2))),
    NextGroupFormed: NextGroupFormed(GroupKey(3, 1)),
    PlanMessage: ProtocolMessage(document(2, 2)),
    PlanPartMessage: ProtocolMessage(PART),
    GoMessage: ProtocolMessage(GO),
    CommitMessage: ProtocolMessage(commit(2)),
    ValidatedMessage: ProtocolMessage(ValidatedMessage(3)),
    ByeMessage: ProtocolMessage(ByeMessage()),
    TransferFailed: FAILED,
    InventoryCounted: InventoryCounted(HOLDS, (0, 1)),
    PlanMade: PlanMade(plan(2, 2)),
    StepTaken: StepTaken(commit(3)),
    NextStepMade: NextStepMade(WHOLE, True),
    ProgramEnded: ProgramEnded(),
    PassEnded: PassEnded(()),
}
# One letter for each mode, in their order: x is impossible, . changes nothing, r has a rule.
CELLS = {
    "EpochMessage": "rrrrrrrrrr.",
    "StopMessage": "rrrrrrrrrr.",
    "NoticeReceived": "rrrrrrrrrr.",
    "StagesBuilt": "rxxxxxxxxx.",
    "PrepareMessage": "xrrrrrrrrr.",
    "PreparePartMessage": "xrrrrrrrrr.",
    "NextGroupMessage": "xrrrrrrrrr.",
    "NextGroupFormed": "xrrrrrrrrr.",
    "PlanPrepared": "xrrrrrrrrr.",
    "GroupFormed": "xxrrrrrrrr.",
    "PlanMessage": "x..r.x.....",
    "PlanPartMessage": "x..r.x.....",
    "GoMessage": "x..xrx.....",
    "CommitMessage": "x.r.rxrr.r.",
    "ValidatedMessage": "x....x.r...",
    "ByeMessage": "xr...x...r.",
    "TransferFailed": "xxrrrrrr.r.",
    "InventoryCounted": "xxxrxxxxxx.",
    "PlanMade": "xxxrxxxxxx.",
    "StepTaken": "xxxrxxrxxx.",
    "NextStepMade": "xxxxxxrxxx.",
    "ProgramEnded": "xxxxxrxxxx.",
    "PassEnded": "xxxxxxxrxx.",
}


def test_every_pair_of_mode_and_input_has_the_cell_that_it_should_have() -> None:
    def letter(mode: Mode, kind: type) -> str:
        cell = TABLE[mode, kind]
        return "x" if isinstance(cell, Impossible) else "." if cell is changes_nothing else "r"

    assert {kind.__name__: "".join(letter(mode, kind) for mode in Mode) for kind in KINDS} == CELLS
    assert len(TABLE) == len(Mode) * len(CELLS)
    assert [in_mode(mode).mode for mode in Mode] == list(Mode)


@looped("mode", Mode)
@looped("kind", KINDS)
def test_a_cell_is_a_rule_or_changes_nothing_or_says_why_it_cannot_be(mode: Mode, kind: type) -> None:
    cell, state = TABLE[mode, kind], in_mode(mode)
    if (mode, kind) == (Mode.FROZEN, StepTaken):
        state = state._replace(plan=plan(2, 3))  # this worker has made the plan, and catches up
    if isinstance(cell, Impossible):
        with pytest.raises(InvariantError, match=f"{kind.__name__} at worker .* while {mode}: {cell.reason}"):
            step(state, SAMPLES[kind])
    elif cell is changes_nothing:
        assert step(state, SAMPLES[kind]) == (state, ())
    else:
        new, outputs = step(state, SAMPLES[kind])
        assert isinstance(new, WorkerState)
        assert all(isinstance(each, Output) for each in outputs)


# Usual steps


def test_a_waiting_worker_enters_the_first_epoch_that_has_it_as_a_member_in_its_open_step() -> None:
    state, outputs = step(WorkerState(), StagesBuilt(2, WHOLE, 0, 0, waits=True))
    assert outputs == (SendMessage(WaitingMessage()),)
    assert step(state, ProtocolMessage(epoch(2, commit=commit(4)))) == (state, ())
    new, outputs = step(state, ProtocolMessage(epoch(3, commit=commit(5), members=(0, 1, 2))))
    assert (new.mode, new.step, outputs) == (Mode.FROZEN, 6, (MarkPhase("fence"), Drop(()), BeginAt(6), CountHeld()))
    assert step(state, ProtocolMessage(epoch(2, members=(0, 1, 2))))[0].step == 0


def test_a_worker_says_that_it_is_ready_and_runs_its_program_in_the_first_epoch() -> None:
    state, outputs = step(WorkerState(), StagesBuilt(0, WHOLE, 0, 0))
    assert outputs == (SendMessage(ReadyMessage()),)
    state, outputs = step(state, ProtocolMessage(first_epoch()))
    assert outputs == (Enter(WHOLE), Run("usual"))
    assert (state.mode, state.epoch, state.held) == (Mode.RUNNING, 1, HELD)


def test_an_epoch_without_a_start_waits_for_it() -> None:
    state, outputs = step(joined(), ProtocolMessage(replace(first_epoch(), go=None)))
    assert (state.mode, outputs) == (Mode.PLANNED, ())
    _, outputs = step(state, ProtocolMessage(GO))
    assert outputs == (Enter(WHOLE), Run("usual"))


def test_a_step_is_run_voted_committed_and_taken() -> None:
    state, outputs = step(running(5), ProgramEnded())
    assert (state.mode, outputs) == (Mode.VOTED, ())
    state, outputs = step(state, ProtocolMessage(commit(5)))
    assert outputs == (TakeStep(commit(5)),)
    state, outputs = step(state, StepTaken(commit(5)))
    assert outputs == (Drop(HELD), ReleaseSends(), Run("usual"))
    assert (state.mode, state.step) == (Mode.RUNNING, 6)


def test_a_commit_that_is_told_twice_is_taken_once() -> None:
    state = fed(voted(5), ProtocolMessage(commit(5)), StepTaken(commit(5)), ProgramEnded())
    assert step(state, ProtocolMessage(commit(5))) == (state, ())


def test_a_commit_of_a_later_step_is_an_error() -> None:
    with pytest.raises(InvariantError, match="step 6 is committed, and worker 0 is voted in step 5"):
        step(voted(5), ProtocolMessage(commit(6)))
    with pytest.raises(InvariantError, match="step 3 is committed, and worker 0 is planned in step 3"):
        step(planned(3), ProtocolMessage(commit(3)))  # this worker has not voted for it


def test_an_audit_comes_when_it_is_due() -> None:
    assert step(voted(1, audit_every=3), StepTaken(commit(1)))[1] == (Drop(HELD), ReleaseSends(), Run("usual"))
    _, outputs = step(voted(2, audit_every=3), StepTaken(commit(2)))
    assert outputs == (Drop(HELD), Audit(2, HELD), ReleaseSends(), Run("usual"))


def kept(number: int, then: Any = "step") -> CommitMessage:
    return replace(commit(number, then), keep=True)


# Worker 0 is the shadow of stage 1, and with every owner but itself gone it owns both stages.
SHARES = (StateShare((0, 1)),)


def test_a_kept_step_is_hashed_and_written_before_the_next_one_runs() -> None:
    state, outputs = step(voted(2), StepTaken(kept(2)))
    assert outputs == (Drop(HELD), Audit(2, HELD), Keep(2, SHARES), ReleaseSends(), Run("usual"))
    assert state.kept == ((0, 1),)
    state, outputs = step(fed(state, ProgramEnded()), StepTaken(commit(3)))
    assert outputs == (Drop(HELD), ReleaseSends(), Run("usual"))
    assert state.kept == ()


def test_the_kept_last_step_is_written_before_the_end() -> None:
    _, outputs = step(voted(4), StepTaken(kept(4, "end")))
    assert outputs == (Drop(HELD), Audit(4, HELD), Keep(4, SHARES), ReleaseSends(), ReportDone(((0, 0),)))


def test_the_owner_writes_the_last_committed_step_when_the_run_stops() -> None:
    """A shadow may wait for its heal, and a worker that has not taken the step has another state."""
    share, owners = StateShare((0, 0)), (0, 1)
    for before in (running(3), voted(3), fed(voted(3), ProtocolMessage(epoch(2)))):
        state, outputs = step(before, ProtocolMessage(StopMessage(2, owners)))
        assert (state.mode, outputs) == (Mode.OUT, (KeepLast(2, (share,)), End(ExitCode.OK)))
        for other in (-1, 1, 3):
            assert step(before, ProtocolMessage(StopMessage(other, owners)))[1] == (End(ExitCode.OK),)
    assert step(voted(3)._replace(kept=((0, 0),)), ProtocolMessage(StopMessage(2, owners)))[1][0] == KeepLast(2, ())
    assert step(running(3), ProtocolMessage(StopMessage(2)))[1] == (KeepLast(2, ()), End(ExitCode.OK))
    heir = StopMessage(2, (0, 0))  # of a worker whose end this one has not heard of
    assert step(running(3), ProtocolMessage(heir))[1][0] == KeepLast(2, (share, StateShare((0, 1))))


def test_the_commit_of_the_step_that_is_to_be_kept_is_obeyed_before_the_stop() -> None:
    inbox = arrived(arrived(Inbox(), commit(3)), StopMessage(3))
    assert inbox.waiting == (commit(3), StopMessage(3))
    assert arrived(arrived(Inbox(), commit(3)), StopMessage(2)).waiting == (StopMessage(2), commit(3))


def test_after_a_death_a_survivor_writes_the_shares_that_it_has_not_begun() -> None:
    state = fed(voted(2), StepTaken(kept(2)))
    state = fed(
        state,
        ProtocolMessage(epoch(2, commit=kept(2))),
        InventoryCounted(HOLDS, (0, 1)),
        ProtocolMessage(document(2, 2)),
    )
    state = fed(state, PlanMade(plan(2, 2)), GroupFormed(2))
    state, outputs = step(state, ProtocolMessage(replace(GO, keep=True)))
    assert [each for each in outputs if isinstance(each, Keep)] == [Keep(2, (StateShare((0, 0)),))]
    assert state.kept == ((0, 1), (0, 0))


def test_a_worker_that_has_missed_a_kept_commit_hashes_it_and_writes_when_training_goes_on() -> None:
    state = fed(
        running(3),
        ProtocolMessage(epoch(2, commit=kept(3))),
        InventoryCounted(HOLDS, (0, 1)),
        ProtocolMessage(document(2, 3)),
    )
    state, outputs = step(fed(state, PlanMade(plan(2, 3))), StepTaken(kept(3)))
    assert outputs[0] == Audit(3, HELD)
    state, outputs = step(fed(state, GroupFormed(2)), ProtocolMessage(replace(GO, keep=True)))
    assert [each for each in outputs if isinstance(each, Keep)] == [Keep(3, (StateShare((0, 0)), StateShare((0, 1))))]


def test_with_shards_an_epoch_hashes_the_last_commit_when_training_goes_on() -> None:
    """The hash gathers shards, and a wait for them may have ended with the epoch."""
    shards = replace(ALONE, grid=replace(GRID, fsdp=1))
    state = fed(
        running(3),
        ProtocolMessage(epoch(2, commit=kept(3))),
        InventoryCounted(HOLDS, (0, 1)),
        ProtocolMessage(document(2, 3)),
    )
    state, outputs = step(fed(state, PlanMade(plan(2, 3)._replace(ownership=shards))), StepTaken(kept(3)))
    assert not [each for each in outputs if isinstance(each, Audit)]
    state, outputs = step(fed(state, GroupFormed(2)), ProtocolMessage(GO))
    found = [each for each in outputs if isinstance(each, Enter | Audit | Run)]
    assert found == [Enter(shards), Audit(3, HELD), Run("plan")]


@pytest.mark.parametrize(("then", "audits"), [("step", [Audit(3, HELD)]), ("end", [Audit(3, HELD)]), ("epoch", [])])
def test_a_gather_for_a_hash_comes_behind_the_checkpoint_and_never_right_before_an_epoch(
    then: str, audits: list[Output]
) -> None:
    shards = replace(ALONE, grid=replace(GRID, pipelines=2, fsdp=1), owners=(0,) * 4, shadows=())
    _, outputs = step(voted(3)._replace(ownership=shards), StepTaken(kept(3, then)))
    first, *rest = [each for each in outputs if isinstance(each, Keep | Audit)]
    assert isinstance(first, Keep)
    assert rest == audits


def test_the_last_commit_leads_to_an_audit_a_validation_and_the_end() -> None:
    last = commit(4, "end")
    state, outputs = step(voted(4, validate_every=3, audit_every=3), StepTaken(last))
    assert outputs == (Drop(HELD), Audit(4, HELD), ReleaseSends(), Validate(4, WHOLE))
    state, outputs = step(fed(state, PassEnded()), ProtocolMessage(ValidatedMessage(4)))
    assert (state.mode, outputs) == (Mode.DONE, (ReportDone(((0, 0),)),))
    state, outputs = step(state, ProtocolMessage(ByeMessage()))
    assert (state.mode, outputs) == (Mode.OUT, (CloseGroup(), End(ExitCode.OK)))


def test_the_next_step_waits_for_the_result_of_a_validation() -> None:
    state, outputs = step(voted(2, validate_every=3), StepTaken(commit(2)))
    assert outputs[-1] == Validate(2, WHOLE)
    state, outputs = step(state, PassEnded(MEASURED))
    assert (state.mode, outputs) == (Mode.VALIDATING, (SendMessage(ValidationMessage(2, MEASURED)),))
    assert step(state, ProtocolMessage(ValidatedMessage(1))) == (state, ())  # of an earlier validation
    assert step(state, ProtocolMessage(ValidatedMessage(2)))[1] == (Run("usual"),)


# Recovery


def test_a_failure_freezes_plans_and_resumes_the_open_step() -> None:
    told = epoch(2, commit=commit(2))
    state, outputs = step(running(3), ProtocolMessage(told))
    assert (state.mode, state.epoch, outputs) == (Mode.FROZEN, 2, (MarkPhase("fence"), CountHeld()))
    state, outputs = step(state, InventoryCounted(HOLDS, (0, 1)))
    said = (SendMessage(InventoryMessage(2, HOLDS, (0, 1))), MarkPhase("inventory"))
    assert outputs == (*said, LeaveGroup(), FormGroup(told))
    state, outputs = step(state, ProtocolMessage(document(2, 2)))
    assert outputs == (MakePlan(document(2, 2)),)
    state, outputs = step(state, PlanMade(plan(2, 2)))
    answered = SendMessage(PlannedMessage(2, "digest 2", ()))
    assert outputs == (answered, Drop(HELD), MarkPhase("plan", ()), LoadPlan(plan(2, 2)))
    assert (state.mode, state.ownership) == (Mode.PLANNED, ALONE)
    state, outputs = step(state, ProtocolMessage(GO))
    assert outputs == ()  # the group is not formed
    state, outputs = step(state, GroupFormed(2))
    assert outputs == (Enter(ALONE), PlanNextStep(3, ALONE, (0, 1), ()), Run("plan"))
    assert step(planned(), GroupFormed(2))[1] == ()  # training has not started
    assert recovering() == state


def test_the_step_after_a_recovery_has_all_shadows_and_the_one_after_a_heal_is_usual() -> None:
    state, outputs = step(fed(recovering(3), ProgramEnded()), StepTaken(commit(3)))
    assert outputs == (Drop(HELD), ReleaseSends(), TakeNextStep())
    state, outputs = step(state, NextStepMade(WHOLE, True))
    assert outputs == (Enter(WHOLE), PlanNextStep(4, WHOLE, (0, 1), ()), Run("heal"))
    state = fed(state, ProgramEnded(), StepTaken(commit(4)))
    state, outputs = step(state, NextStepMade(WHOLE, False))
    assert outputs == (Enter(WHOLE), Run("usual"))
    _, outputs = step(fed(state, ProgramEnded()), StepTaken(commit(5)))
    assert outputs == (Drop(HELD), ReleaseSends(), Run("usual"))


def test_an_epoch_without_a_new_group_keeps_the_old_one() -> None:
    state = fed(running(3), ProtocolMessage(epoch(2, regroup=False, commit=commit(2))))
    state, outputs = step(state, InventoryCounted(HOLDS, (0, 1)))
    assert outputs == (SendMessage(InventoryMessage(2, HOLDS, (0, 1))), MarkPhase("inventory"))
    state = fed(state, ProtocolMessage(document(2, 2)), PlanMade(plan(2, 2)))
    assert step(state, ProtocolMessage(GO))[1][-1] == Run("plan")


def test_a_commit_after_the_inventory_changes_nothing() -> None:
    for state in (in_mode(Mode.FROZEN), fed(in_mode(Mode.FROZEN), InventoryCounted(HOLDS, (0, 1)))):
        assert step(state, ProtocolMessage(commit(3))) == (state, ())


def test_a_commit_that_a_worker_has_missed_is_taken_before_its_answer() -> None:
    state = fed(running(3, audit_every=1), ProtocolMessage(epoch(2, commit=commit(3))), InventoryCounted(HOLDS, (0, 1)))
    state = fed(state, ProtocolMessage(document(2, 3)))
    state, outputs = step(state, PlanMade(plan(2, 3)))
    assert (state.mode, outputs) == (Mode.FROZEN, (CatchUp(commit(3)),))
    state, outputs = step(state, StepTaken(commit(3)))
    assert outputs[:2] == (Audit(3, HELD), SendMessage(PlannedMessage(2, "digest 2", ())))
    assert (state.mode, state.step) == (Mode.PLANNED, 4)


def test_a_commit_that_a_worker_has_taken_is_not_taken_again() -> None:
    state = fed(running(4, audit_every=1), ProtocolMessage(epoch(2, commit=commit(3))), InventoryCounted(HOLDS, (0, 1)))
    _, outputs = step(fed(state, ProtocolMessage(document(2, 3))), PlanMade(plan(2, 3)))
    assert not any(isinstance(each, CatchUp | Audit) for each in outputs)


def test_a_worker_that_has_missed_an_earlier_commit_is_an_error() -> None:
    state = fed(
        running(3),
        ProtocolMessage(epoch(2, commit=commit(4))),
        InventoryCounted(HOLDS, (0, 1)),
        ProtocolMessage(document(2, 4)),
    )
    with pytest.raises(InvariantError, match="step 4 is committed, and worker 0 is at 3"):
        step(state, PlanMade(plan(2, 4)))


def test_adopted_slots_are_audited_and_kept() -> None:
    state = fed(
        running(3, audit_every=1),
        ProtocolMessage(epoch(2, commit=commit(2))),
        InventoryCounted(HOLDS, (0,)),
        ProtocolMessage(document(2, 2)),
    )
    _, outputs = step(state, PlanMade(plan(2, 2, adopted=((0, 1),))))
    assert outputs[1:] == (
        Adopt(((0, 1),)),
        Audit(2, ((0, 1),)),
        Drop(HELD),
        MarkPhase("plan", ((0, 1),)),
        LoadPlan(plan(2, 2, adopted=((0, 1),))),
    )


def test_nothing_is_adopted_or_dropped_if_a_stage_is_lost() -> None:
    state = fed(
        running(3),
        ProtocolMessage(epoch(2, commit=commit(2))),
        InventoryCounted(HOLDS, (0,)),
        ProtocolMessage(document(2, 2)),
    )
    _, outputs = step(state, PlanMade(plan(2, 2, lost=(1,))))
    assert outputs == (SendMessage(PlannedMessage(2, "digest 2", (1,))), MarkPhase("plan", ()))


def test_a_plan_of_another_epoch_and_a_second_plan_change_nothing() -> None:
    state = fed(in_mode(Mode.FROZEN), InventoryCounted(HOLDS, (0, 1)))
    for number in (1, 3):
        assert step(state, ProtocolMessage(document(number, 2))) == (state, ())
    assert step(planned(), ProtocolMessage(document(2, 2))) == (planned(), ())


def test_a_plan_is_never_accepted_while_a_program_runs() -> None:
    with pytest.raises(InvariantError, match="waits until the program has ended"):
        step(running(3), ProtocolMessage(document(1, 2)))


@looped("mode", [mode for mode in Mode if mode not in (Mode.JOINING, Mode.WAITING, Mode.OUT)])
def test_a_newer_epoch_ends_every_wait_even_if_one_is_skipped_and_an_old_one_changes_nothing(mode: Mode) -> None:
    state, outputs = step(in_mode(mode), ProtocolMessage(epoch(9)))
    assert (state.mode, state.epoch, outputs) == (Mode.FROZEN, 9, (MarkPhase("fence"), CountHeld()))
    assert (state.plan, state.go) == (None, None)
    for number in (9, 8):
        assert step(state, ProtocolMessage(epoch(number))) == (state, ())


def test_a_group_of_an_older_epoch_is_not_taken_for_that_of_the_present_one() -> None:
    state = fed(planned(), ProtocolMessage(epoch(3, commit=commit(2))), InventoryCounted(HOLDS, (0, 1)))
    for late in (GroupFormed(2), GroupFormed(2, FAILED)):
        assert step(state, late) == (state, ())
    state = fed(state, ProtocolMessage(document(3, 2)), PlanMade(plan(3, 2)), ProtocolMessage(GO))
    assert step(state, GroupFormed(3))[1][-1] == Run("plan")


def test_a_worker_whose_group_is_not_formed_takes_only_what_interrupts() -> None:
    """The others commit a step without a worker that has no part in it, before it knows of its group."""
    state = fed(planned(), ProtocolMessage(GO))
    assert (planned().awaits_group, state.awaits_group) == (False, True)
    assert not fed(state, GroupFormed(2)).awaits_group


def test_a_group_that_cannot_be_formed_is_reported_when_training_begins() -> None:
    state, outputs = step(planned(), GroupFormed(2, FAILED))
    assert outputs == ()
    state, outputs = step(state, ProtocolMessage(GO))
    assert (state.mode, outputs) == (Mode.SUSPECTING, (SendMessage(SuspicionMessage(2, "it broke", 1)),))
    state, outputs = step(fed(planned(), ProtocolMessage(GO)), GroupFormed(2, FAILED))
    assert (state.mode, outputs) == (Mode.SUSPECTING, (SendMessage(SuspicionMessage(2, "it broke", 1)),))
    state = fed(state, ProtocolMessage(epoch(3, commit=commit(2))), InventoryCounted(HOLDS, (0, 1)), GroupFormed(3))
    state = fed(state, ProtocolMessage(document(3, 2)), PlanMade(plan(3, 2)))
    assert step(state, ProtocolMessage(GO))[1][-1] == Run("plan")


def test_a_failed_transfer_is_reported_once_and_the_next_epoch_decides() -> None:
    state, outputs = step(running(3), FAILED)
    assert (state.mode, outputs) == (Mode.SUSPECTING, (SendMessage(SuspicionMessage(1, "it broke", 1)),))
    for deaf in (FAILED, ProtocolMessage(commit(3)), ProtocolMessage(document(1, 2)), ProtocolMessage(GO)):
        assert step(state, deaf) == (state, ())
    assert step(state, ProtocolMessage(epoch(2)))[0].mode is Mode.FROZEN


def test_a_validation_is_redone_after_a_failure_in_it() -> None:
    state = fed(voted(3, validate_every=1), ProtocolMessage(commit(3)), StepTaken(commit(3)))
    assert state.mode is Mode.VALIDATING
    state = fed(
        state,
        ProtocolMessage(epoch(2, commit=commit(3))),
        InventoryCounted(HOLDS, (0, 1)),
        ProtocolMessage(document(2, 3)),
    )
    state = fed(state, PlanMade(plan(2, 3)), GroupFormed(2))
    state, outputs = step(state, ProtocolMessage(replace(GO, validate=True)))
    assert outputs == (Enter(ALONE), PlanNextStep(4, ALONE, (0, 1), ()), Validate(3, ALONE))
    state, outputs = step(fed(state, PassEnded()), ProtocolMessage(ValidatedMessage(3)))
    assert outputs == (Run("plan"),)  # the plan has not been run yet: no heal comes before it


def test_a_recovery_after_the_last_step_ends_the_job_again() -> None:
    done = in_mode(Mode.DONE)
    state = fed(
        done,
        ProtocolMessage(epoch(2, commit=commit(3, "end"))),
        InventoryCounted(HOLDS, (0, 1)),
        ProtocolMessage(document(2, 3)),
    )
    state = fed(state, PlanMade(plan(2, 3)), GroupFormed(2))
    state, outputs = step(state, ProtocolMessage(GoMessage(end=True, validate=False)))
    assert (state.mode, outputs) == (Mode.DONE, (Enter(ALONE), ReportDone(HELD)))


# Hand-over


def prepared(number: int = 3) -> WorkerState:
    """Returns a worker that has prepared epoch 2, and waits for it at the boundary after step `number`."""
    ended = commit(number, "epoch")
    state = fed(voted(number), PlanPrepared(7, plan(2, number)), ProtocolMessage(ended), StepTaken(ended))
    assert state.mode is Mode.BOUNDARY
    return state


def hand_over(number: int = 3, **fields: Any) -> EpochMessage:
    values = {"gather": False, "regroup": False, "digest": "digest 2", "go": GO}
    return epoch(2, commit=commit(number, "epoch"), **{**values, **fields})


def test_a_plan_is_prepared_and_answered_in_any_mode() -> None:
    told = PrepareMessage(7, document(2, 3))
    for mode in (Mode.RUNNING, Mode.VOTED, Mode.FROZEN, Mode.SUSPECTING):
        before = in_mode(mode)
        assert step(before, ProtocolMessage(told)) == (before, (PreparePlan(told),))
        state, outputs = step(before, PlanPrepared(7, plan(2, 3)))
        assert outputs == (SendMessage(PreparedMessage(2, 7, "digest 2")),)
        assert state == before._replace(prepared=(plan(2, 3),))


def test_a_part_of_a_plan_is_prepared_from_the_grid_of_the_epoch_before_it_which_may_be_prepared_too() -> None:
    rests, wanted = (ProgramRest(0, 0), ProgramRest(1, 0)), (1, 1)
    base, whole = first_grid(1, Members.of((0, 1)), WHOLE), document(2, 3)
    plan = replace(whole, owners=WHOLE.owners, before=WHOLE.owners, wanted=wanted, repair=Repair(rests, (), (), (), ()))
    part = dict(parts_of(plan, base, GRID))[0]
    (order,) = step(running(3), ProtocolMessage(PreparePartMessage(7, part, HOLDS)))[1]
    assert isinstance(order, PreparePlan) and order.order.number == 7
    made = order.order.plan
    assert (grid_of(made), made.wanted, made.inventories) == (grid_of(plan), wanted, ((0, HOLDS),))
    later = replace(part, epoch=3, change=replace(part.change, base=2))
    told = ProtocolMessage(PreparePartMessage(8, later, HOLDS))
    assert step(running(3), told)[1] == (SendMessage(WholePlanMessage(3)),)
    prepared_before = EpochPlan(replace(plan, epoch=2), WHOLE, Plan(4, {}, (), (), "digest"))
    (order,) = step(running(3)._replace(prepared=(prepared_before,)), told)[1]
    assert isinstance(order, PreparePlan) and order.order.plan.epoch == 3


def test_of_the_prepared_plans_the_latest_of_two_epochs_are_kept() -> None:
    older, newer = plan(2, 3), plan(2, 4)
    state = fed(running(3), PlanPrepared(1, older), PlanPrepared(2, newer), PlanPrepared(3, plan(3, 5)))
    assert [each.document.epoch for each in state.prepared] == [2, 3]
    assert state.prepared[0] == newer
    assert [each.document.epoch for each in fed(state, PlanPrepared(4, plan(5, 9))).prepared] == [5]


def test_a_prepared_epoch_begins_with_one_message() -> None:
    state, outputs = step(prepared(), ProtocolMessage(hand_over()))
    assert outputs == (MarkPhase("fence"), CountHeld())
    state, outputs = step(state, InventoryCounted(HOLDS, (0, 1)))
    taken_over = (Drop(HELD), MarkPhase("plan", ()), LoadPlan(plan(2, 3)))
    assert outputs == (*taken_over, Enter(ALONE), PlanNextStep(4, ALONE, (0, 1), ()), Run("plan"))
    assert (state.mode, state.epoch, state.ownership) == (Mode.RUNNING, 2, ALONE)


def test_a_worker_that_learns_of_a_prepared_epoch_before_its_commit_catches_up_first() -> None:
    state = fed(voted(3, audit_every=1), PlanPrepared(7, plan(2, 3)))
    state, outputs = step(state, ProtocolMessage(hand_over()))
    assert outputs == (MarkPhase("fence"), Drop(((0, 0), (0, 1))), CatchUp(commit(3, "epoch")))
    state, outputs = step(state, StepTaken(commit(3, "epoch")))
    assert outputs == (Audit(3, HELD), CountHeld())
    assert step(state, InventoryCounted(HOLDS, (0, 1)))[1][-1] == Run("plan")


def test_a_prepared_epoch_may_order_the_validation_or_the_start_later() -> None:
    validates = hand_over(go=GoMessage(end=False, validate=True))
    assert step(fed(prepared(), ProtocolMessage(validates)), InventoryCounted(HOLDS, (0, 1)))[1][-1] == Validate(
        3, ALONE
    )
    state = fed(prepared(), ProtocolMessage(hand_over(go=None)), InventoryCounted(HOLDS, (0, 1)))
    assert state.mode is Mode.PLANNED
    assert step(state, ProtocolMessage(GO))[1][-1] == Run("plan")


@pytest.mark.parametrize("digest", ["another digest", "digest 3"])
def test_a_prepared_epoch_with_another_digest_is_an_error(digest: str) -> None:
    with pytest.raises(InvariantError, match=f"epoch 2 has plan {digest}, worker 0 has prepared digest 2"):
        step(prepared(), ProtocolMessage(hand_over(digest=digest)))
    with pytest.raises(InvariantError, match="worker 0 has prepared None"):
        step(in_mode(Mode.BOUNDARY), ProtocolMessage(hand_over()))


def test_a_prepared_epoch_with_another_inventory_is_an_error() -> None:
    state = fed(prepared(), ProtocolMessage(hand_over()))
    with pytest.raises(InvariantError, match="worker 0 holds more, another inventory than in epoch 2"):
        step(state, InventoryCounted("more", (0, 1)))


def test_an_epoch_that_gathers_does_not_use_a_prepared_plan() -> None:
    assert step(prepared(), ProtocolMessage(epoch(2)))[1] == (MarkPhase("fence"), CountHeld())


# The end


def test_a_worker_that_is_excluded_leaves_and_says_whether_it_had_given_notice() -> None:
    others = epoch(2, members=(1,))
    state, outputs = step(running(3), ProtocolMessage(others))
    assert (state.mode, outputs) == (Mode.OUT, (End(ExitCode.FENCED),))
    state, outputs = step(running(3), NoticeReceived())
    assert (state.mode, outputs) == (Mode.RUNNING, (SendMessage(NoticeMessage()),))
    assert step(state, NoticeReceived()) == (state, ())  # once is enough
    state, outputs = step(state, ProtocolMessage(others))
    assert (state.mode, outputs) == (Mode.OUT, (End(ExitCode.LEFT_WITH_NOTICE),))


def test_a_notice_before_the_worker_has_joined_counts() -> None:
    state = fed(WorkerState(), NoticeReceived(), StagesBuilt(0, WHOLE, 0, 0), ProtocolMessage(first_epoch()))
    assert step(state, ProtocolMessage(epoch(2, members=(1,))))[1] == (End(ExitCode.LEFT_WITH_NOTICE),)


def test_a_worker_that_has_not_joined_gives_up_at_an_epoch() -> None:
    assert step(WorkerState(), ProtocolMessage(epoch(1)))[1] == (End(ExitCode.NOT_RECOVERED),)


# The inbox


def test_messages_wait_in_order() -> None:
    inbox = arrived(arrived(Inbox(), commit(1)), ValidatedMessage(1))
    assert not inbox.is_urgent
    first, inbox = taken(inbox)
    second, inbox = taken(inbox)
    assert (first, second, inbox.waiting) == (commit(1), ValidatedMessage(1), ())


def test_an_epoch_drops_the_messages_in_front_of_it_and_interrupts() -> None:
    inbox = arrived(arrived(arrived(Inbox(), commit(1)), epoch(2)), document(2, 1))
    assert inbox.waiting == (epoch(2), document(2, 1))
    assert inbox.is_urgent
    assert arrived(inbox, epoch(2)) == inbox
    assert arrived(inbox, epoch(3)).waiting == (epoch(3),)
    assert arrived(taken(inbox)[1], epoch(2)).waiting == (document(2, 1),)  # it is known


def test_the_end_interrupts_and_no_epoch_drops_it() -> None:
    inbox = arrived(arrived(Inbox(), commit(1)), StopMessage())
    assert inbox.waiting == (StopMessage(), commit(1))
    assert inbox.is_urgent
    assert arrived(inbox, epoch(2)).waiting == (StopMessage(), epoch(2))
