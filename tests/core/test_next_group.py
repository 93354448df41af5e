"""The group of a coming epoch: the coordinator orders it, workers form it while they train, and one epoch enters it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.codec.documents import documents, resume
from engine.core.errors import ExitCode, InvariantError
from engine.core.messages import (
    ByeMessage,
    CommitMessage,
    EpochMessage,
    HeartbeatMessage,
    KeyMessage,
    NextGroupFormedMessage,
    NextGroupMessage,
    WaitingMessage,
)
from engine.core.program.inventory import PlanMessage, PreparedMessage, PrepareMessage, PreparePartMessage
from engine.core.protocol.coordinator import is_to_be_kept
from engine.core.protocol.coordinator_state import CoordinatorState, NextGroup, attempted
from engine.core.protocol.events import Notice, WantedOwners
from engine.core.protocol.inputs_outputs import Kill, Note, Tell
from engine.core.protocol.state import Phase
from engine.core.protocol.worker_inputs import GroupKey, NextGroupFormed, NoticeReceived, ProtocolMessage
from engine.core.protocol.worker_machine import step as worker_step
from engine.core.protocol.worker_state import (
    End,
    EnterNextGroup,
    FormNextGroup,
    LeaveNextGroups,
    MarkPhase,
    Mode,
    SendMessage,
    WorkerState,
)
from tests.core.coordinator_cases import Outputs, committed, given, heard, killed, told, training
from tests.core.membership_cases import S
from tests.core.test_worker_machine import epoch, fed, hand_over, prepared, running, waiting

ORDER = NextGroupMessage(2, 1, (0, 1, 2, 3))


def joining(*, joins: bool = True, **how: int) -> tuple[CoordinatorState, Outputs]:
    """Returns a coordinator in epoch 1 to which worker 3 has said that it waits."""
    return given(training(**how), heard(3, WaitingMessage(joins)))


def formed(
    state: CoordinatorState, *workers: int, number: int = 1, failure: str = ""
) -> tuple[CoordinatorState, Outputs]:
    return given(state, *(heard(each, NextGroupFormedMessage(2, number, failure)) for each in workers))


def answered(state: CoordinatorState, *missing: int) -> CoordinatorState:
    """Returns the state after the answers to the latest preparation."""
    plan = document(state)
    answer = PreparedMessage(plan.epoch, state.preparation.number, "plan")
    return given(state, *(heard(each, answer) for each in plan.members if each not in missing))[0]


def document(state: CoordinatorState) -> PlanMessage:
    """Returns the document of the latest preparation."""
    assert state.preparation.document is not None
    return state.preparation.document


def prepared_by(outputs: Outputs) -> list[int]:
    """Returns the workers that are told to prepare a plan; members get parts of it, and newcomers the whole."""
    orders = [each for each in outputs if isinstance(each, Tell)]
    return [
        worker
        for workers, message in orders
        if isinstance(message, PrepareMessage | PreparePartMessage)
        for worker in workers
        if isinstance(message, PrepareMessage) is (worker == 3)
    ]


# The coordinator


def test_a_joiner_becomes_a_member_with_a_commit_and_no_worker_waits() -> None:
    state, outputs = joining()
    assert [each for each in outputs if isinstance(each, Tell)] == [Tell((0, 1, 2, 3), ORDER)]
    state, outputs = formed(state, 0, 1, 2)
    assert outputs == ()
    state, outputs = formed(state, 3)
    assert len(outputs) == 4 and prepared_by(outputs) == [0, 1, 2, 3]
    plan = document(state)
    assert (plan.epoch, plan.members, plan.owners) == (2, (0, 1, 2, 3), (0, 1, 2))
    state, outputs = committed(answered(state))
    commit, entered = told(outputs)[:2]
    assert isinstance(commit, CommitMessage) and isinstance(entered, EpochMessage)
    assert (entered.group, entered.members.runs, entered.gather, entered.regroup) == (1, ((0, 3),), False, False)
    assert (entered.commit, entered.digest) == (commit, "plan")
    known = state.membership
    assert (known.phase, known.epoch, known.members, known.waiting) == (Phase.RUNNING, 2, (0, 1, 2, 3), ())
    assert known.planned and known.verdict == ()


@pytest.mark.parametrize("missing", ["a group", "a plan"])
def test_a_step_is_committed_without_the_joiner_if_an_answer_is_missing(missing: str) -> None:
    state, _ = joining()
    state, outputs = formed(state, 0, 1, 2, *([3] if missing == "a plan" else []))
    if missing == "a plan":
        assert prepared_by(outputs) == [0, 1, 2, 3]
        state = answered(state, 3)
    state, outputs = committed(state)
    commit = told(outputs)[0]
    assert isinstance(commit, CommitMessage) and commit.then == "step"
    assert (state.membership.epoch, state.membership.waiting) == (1, (3,))
    assert not any(isinstance(each, NextGroupMessage) for each in told(outputs)), "the group stays, or goes on forming"
    assert prepared_by(outputs) == ([0, 1, 2, 3] if missing == "a plan" else [])
    assert missing == "a group" or document(state).committed == 1


def test_a_waiting_worker_that_does_not_join_waits() -> None:
    state, outputs = joining(joins=False)
    assert told(outputs) == []
    assert told(committed(state)[1])[1:] == []


def test_a_worker_that_waits_makes_up_for_one_that_is_missing_or_leaves() -> None:
    known = joining(joins=False)[0].membership
    assert known.joiners == ()
    full = known._replace(options=replace(known.options, workers=3))
    assert full.joiners == ()
    assert full._replace(leaving=(1,)).joiners == (3,)
    assert full._replace(members=(0, 1)).joiners == (3,)
    assert full._replace(members=(0, 1), waiting=(3, 4)).joiners == (3,)
    assert full._replace(members=(0, 1), waiting=(3, 4), eager=(4,)).joiners == (4,)


def test_no_more_join_than_may_train_at_the_same_time() -> None:
    known = joining()[0].membership._replace(waiting=(3, 4, 5), eager=(3, 4, 5))
    assert known.joiners == (3, 4, 5)
    limited = known._replace(options=replace(known.options, workers=3, most_workers=4))
    assert limited.joiners == (3,)
    assert limited._replace(leaving=(1,)).joiners == (3, 4)
    assert limited._replace(members=(0, 1), eager=(5,)).joiners == (5,)
    assert limited._replace(members=(0, 1, 2, 6)).joiners == ()
    assert limited._replace(members=(0, 1, 2, 6, 7)).joiners == ()


def test_the_joiner_that_dies_ends_the_attempt_and_no_epoch_begins() -> None:
    state, _ = joining()
    state, outputs = given(state, killed(3))
    assert NextGroupMessage(2, 2, ()) in told(outputs)
    assert (state.membership.epoch, list(state.membership.lost)) == (1, [3])
    assert formed(state, 0, 1, 2)[0].next_group.formed == frozenset()


def test_another_joiner_makes_another_attempt_and_old_answers_do_not_count() -> None:
    state, _ = joining()
    state, _ = formed(state, 0, 1, 2)
    state, outputs = given(state, heard(4, WaitingMessage(True)))
    assert told(outputs) == [NextGroupMessage(2, 2, (0, 1, 2, 3, 4))]
    state, outputs = formed(state, 3)
    assert outputs == ()
    assert state.next_group.formed == frozenset()


def test_a_member_that_dies_makes_a_verdict_that_takes_the_joiner_in() -> None:
    state, _ = joining()
    state, _ = formed(state, 0, 1, 3)
    state, outputs = given(state, killed(2))
    (entered,) = [each for each in told(outputs) if isinstance(each, EpochMessage)]
    assert (entered.epoch, entered.members.runs, entered.regroup, entered.group) == (2, ((0, 1), (3, 3)), True, 0)
    assert formed(state, 2)[1] == ()


def test_an_attempt_that_fails_is_given_up_and_made_again_after_the_next_commit_three_times() -> None:
    state, _ = joining()
    for number in (1, 2, 3):
        state, outputs = formed(state, 2, number=number, failure="no way there")
        words = "worker 2 could not form the group in which workers are to join: no way there"
        assert outputs == (Tell((0, 1, 2, 3), NextGroupMessage(2, number, ())), Note(words))
        assert formed(state, 0, 1, 3, number=number)[1] == (), "the attempt is over"
        state, outputs = committed(state)
        again = [each for each in told(outputs) if isinstance(each, NextGroupMessage)]
        assert again == ([NextGroupMessage(2, number + 1, (0, 1, 2, 3))] if number < 3 else [])


def test_nobody_joins_with_the_last_commit() -> None:
    state, outputs = joining(last_step=1)
    assert told(outputs) == [ORDER]
    state, _ = formed(state, 0, 1, 2)
    state, outputs = committed(state)
    assert NextGroupMessage(2, 2, ()) in told(outputs)
    assert joining(last_step=0)[1] == given(training(last_step=0), heard(3, WaitingMessage(False)))[1]


def test_a_leaving_worker_does_not_wait_for_a_joiner() -> None:
    state, _ = joining()
    state, outputs = given(state, Notice(6, 2, 120 * S))
    assert prepared_by(outputs) == [0, 1, 2] and document(state).members == (0, 1, 2)
    state, outputs = committed(answered(state))
    (entered,) = [each for each in told(outputs) if isinstance(each, EpochMessage)]
    assert (entered.epoch, entered.members.runs, entered.group) == (2, ((0, 2),), 0)
    assert NextGroupMessage(3, 1, (0, 1, 2, 3)) in told(outputs), "the attempt for epoch 2 has ended with it"


def test_a_wish_that_names_a_joiner_waits_for_it_as_a_whole() -> None:
    state, _ = joining()
    state, outputs = given(state, WantedOwners(6, (1, 1, 3), "a test"))
    assert told(outputs) == [], "no epoch is prepared for a part of the wish"
    assert (state.membership.wanted, state.membership.wanted_moves) == ((1, 1, 3), {})
    state, outputs = formed(state, 0, 1, 2, 3)
    assert prepared_by(outputs) == [0, 1, 2, 3] and document(state).wanted == (1, 1, 3)
    state, _ = committed(answered(state))
    assert state.membership.wanted_moves == {0: 1, 2: 3}
    lost, _ = given(joining()[0], WantedOwners(6, (1, 1, 3), "a test"), killed(3))
    assert lost.membership.wanted_moves == {0: 1}


def test_a_sign_of_life_of_a_worker_that_is_still_being_started_is_not_answered() -> None:
    """It would take an epoch without it for the verdict on it, and end."""
    beat = HeartbeatMessage(0, 0, 0, False)
    assert given(training(), heard(3, beat))[1] == ()


def test_the_keys_of_the_group_reach_the_joiner() -> None:
    state, _ = joining()
    ((tell),) = given(state, heard(0, KeyMessage(2, "a", "b")))[1]
    assert isinstance(tell, Tell) and tell.workers == (0, 1, 2, 3)
    ((tell),) = given(state, heard(0, KeyMessage(1, "a", "b")))[1]
    assert isinstance(tell, Tell) and tell.workers == (0, 1, 2)


def test_another_coordinator_knows_who_is_to_join() -> None:
    state, _ = joining()
    assert is_to_be_kept(training(), state, heard(3, WaitingMessage(True)), ())
    known = resume(state.job, documents(state), 9).membership
    assert (known.joiners, known.eager) == ((3,), (3,))
    assert attempted(NextGroup(), known)[1] == ORDER


# The worker


def test_a_group_is_formed_in_any_mode_and_said() -> None:
    for before in (running(3), waiting()):
        state, outputs = worker_step(before, ProtocolMessage(ORDER))
        assert (outputs, dict(state.next_groups)) == ((FormNextGroup(ORDER),), {GroupKey(2, 1): False})
        assert worker_step(state, ProtocolMessage(ORDER)) == (state, ()), "said twice"
        state, outputs = worker_step(state, NextGroupFormed(GroupKey(2, 1)))
        assert (outputs, state.next_groups) == ((SendMessage(NextGroupFormedMessage(2, 1)),), {GroupKey(2, 1): True})
        assert state.mode is before.mode


def test_a_failure_is_said_and_the_attempt_is_left() -> None:
    state = fed(running(3), ProtocolMessage(ORDER))
    state, outputs = worker_step(state, NextGroupFormed(GroupKey(2, 1), "no way there"))
    said = SendMessage(NextGroupFormedMessage(2, 1, "no way there"))
    assert (outputs, state.next_groups) == ((LeaveNextGroups((GroupKey(2, 1),)), said), {})


@pytest.mark.parametrize("members", [(), (1, 2), (0, 1, 2, 3)])
def test_a_later_attempt_gives_the_one_before_up(members: tuple[int, ...]) -> None:
    state = fed(running(3), ProtocolMessage(ORDER), NextGroupFormed(GroupKey(2, 1)))
    later = NextGroupMessage(2, 2, members)
    state, outputs = worker_step(state, ProtocolMessage(later))
    left = (LeaveNextGroups((GroupKey(2, 1),)),)
    assert outputs == ((*left, FormNextGroup(later)) if 0 in members else left)
    assert [*state.next_groups] == ([GroupKey(2, 2)] if 0 in members else [])
    assert worker_step(state, NextGroupFormed(GroupKey(2, 1))) == (state, ()), "it has just been given up"


def test_the_group_of_a_later_epoch_leaves_the_one_before_to_the_main_thread() -> None:
    """The message of epoch 2 may still lie in the inbox when the order for epoch 3 comes."""
    state = fed(
        prepared(),
        ProtocolMessage(ORDER),
        NextGroupFormed(GroupKey(2, 1)),
        ProtocolMessage(NextGroupMessage(3, 1, (0, 1))),
    )
    state, outputs = worker_step(state, ProtocolMessage(hand_over(group=1)))
    assert outputs[:2] == (MarkPhase("fence"), EnterNextGroup(GroupKey(2, 1)))
    assert dict(state.next_groups) == {GroupKey(3, 1): False}
    assert worker_step(state, ProtocolMessage(ORDER)) == (state, ()), "of an epoch that has come"


def test_the_epoch_that_names_the_group_enters_it_and_leaves_no_other() -> None:
    state = fed(prepared(), ProtocolMessage(ORDER), NextGroupFormed(GroupKey(2, 1)))
    state, outputs = worker_step(state, ProtocolMessage(hand_over(group=1)))
    assert outputs[:2] == (MarkPhase("fence"), EnterNextGroup(GroupKey(2, 1)))
    assert state.next_groups == {}


@pytest.mark.parametrize("group", [1, 2])
def test_a_group_that_is_not_formed_or_of_another_attempt_is_never_entered(group: int) -> None:
    state = fed(prepared(), ProtocolMessage(ORDER), *([NextGroupFormed(GroupKey(2, 1))] if group == 2 else []))
    with pytest.raises(InvariantError, match=f"epoch 2 enters group {group}, and worker 0 has"):
        worker_step(state, ProtocolMessage(hand_over(group=group)))


def test_any_other_epoch_gives_the_group_up() -> None:
    state = fed(running(3), ProtocolMessage(ORDER), NextGroupFormed(GroupKey(2, 1)))
    for other in (epoch(2), epoch(3)):
        new, outputs = worker_step(state, ProtocolMessage(other))
        assert outputs[:2] == (MarkPhase("fence"), LeaveNextGroups((GroupKey(2, 1),)))
        assert new.next_groups == {}


def test_a_waiting_worker_ignores_the_commit_that_comes_again_with_its_epoch() -> None:
    assert worker_step(waiting(), ProtocolMessage(CommitMessage(3, 1.0, "epoch"))) == (waiting(), ())
    assert worker_step(WorkerState(mode=Mode.WAITING), ProtocolMessage(ByeMessage()))[0].mode is Mode.OUT


def test_a_worker_that_gives_notice_while_it_waits_leaves_with_the_code_of_a_notice() -> None:
    state, _ = joining()
    state, outputs = given(state, Notice(6, 3, S))
    assert Tell((3,), ByeMessage()) in outputs
    assert not any(isinstance(each, Kill) for each in outputs)
    assert worker_step(waiting(), ProtocolMessage(ByeMessage()))[1] == (End(ExitCode.OK),)
    noticed = fed(waiting(), NoticeReceived())
    assert worker_step(noticed, ProtocolMessage(ByeMessage()))[1] == (End(ExitCode.LEFT_WITH_NOTICE),)


def test_a_plan_is_made_by_its_members_only() -> None:
    order = PrepareMessage(7, prepared().prepared[0].document)
    assert len(worker_step(running(3), ProtocolMessage(order))[1]) == 1
    assert worker_step(waiting(), ProtocolMessage(order))[1] == ()
