"""The coordinator: the messages and records for each input, in order, and once only."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.codec.documents import documents, resume
from engine.core import messages
from engine.core.errors import DivergedError, ExitCode, InvariantError, WorkerException
from engine.core.history.process_records import CutShortRecord, DeadlyRecord, RestartRecord, WayOutRecord
from engine.core.history.run_records import (
    CommitRecord,
    EpochRecord,
    FinishedRecord,
    GoRecord,
    NoticeRecord,
    PartitionRecord,
    PlanRecord,
    StaysRecord,
    StoppedEarlyRecord,
    SuspicionRecord,
    ValidationRecord,
)
from engine.core.messages import ByeMessage, CommitMessage, EpochMessage, GoMessage
from engine.core.ownership import Members
from engine.core.program.ballot import Commit
from engine.core.program.inventory import (
    PlanMessage,
    PreparedMessage,
    PrepareMessage,
    PreparePartMessage,
    WholePlanMessage,
)
from engine.core.program.plan_parts import both_digests
from engine.core.protocol.coordinator import is_to_be_kept, step
from engine.core.protocol.coordinator_state import CoordinatorState, begin
from engine.core.protocol.events import JobRestart, LeaseExpired, Notice, Takeover
from engine.core.protocol.inputs_outputs import (
    Arm,
    ClockTick,
    CoordinatorInput,
    CoordinatorOutput,
    Fail,
    KeepStep,
    Kill,
    Note,
    OrphanParts,
    PhaseReached,
    Place,
    Release,
    Restart,
    RunStopping,
    Stop,
    Teach,
    Tell,
    Write,
)
from engine.core.protocol.state import Phase
from tests.core.coordinator_cases import S, answers, begun, committed, given, heard, killed, told, training, written
from tests.core.coordinator_cases import votes as votes_of


def kinds(outputs: tuple[object, ...]) -> list[type]:
    return [type(each) for each in outputs]


def test_the_last_worker_to_join_begins_training() -> None:
    state, outputs = given(begun(), *(heard(worker, messages.ReadyMessage()) for worker in range(3)))
    first, *outputs = outputs  # type: ignore[assignment]
    assert first == OrphanParts()
    assert kinds(outputs) == [Tell, Write, PhaseReached, Arm, Write, PhaseReached, Note, Write], "one host is deadly"
    go, members = GoMessage(False, False), Members.of((0, 1, 2))
    assert outputs[0] == Tell((0, 1, 2), EpochMessage(1, members, False, False, None, None, go, hosts=(0, 0, 1)))
    assert kinds(tuple(written(outputs))) == [EpochRecord, GoRecord, DeadlyRecord]
    assert (outputs[2], outputs[3], outputs[5]) == (PhaseReached("agree", 1), Arm(), PhaseReached("replay", 1))
    assert state.started == 1 and state.ballot is not None


def test_the_last_vote_tells_the_commit_before_it_is_recorded_and_opens_the_next_ballot() -> None:
    state, outputs = committed(training())
    message = CommitMessage(0, state.job.clip_norm / math.sqrt(3) if state.job.clip_norm else 1.0, "step")
    assert outputs[0] == Tell((0, 1, 2), message)
    (record,) = written(outputs)
    assert isinstance(record, CommitRecord) and (record.step, record.loss, record.last) == (0, 0.5, False)
    assert outputs[2] == PhaseReached("heal", 1)
    assert state.commit == Commit(0, 0.5, math.sqrt(3), message.clip_factor)
    assert state.ballot is not None and (state.ballot.step, len(state.ballot.missing)) == (1, 6)


def test_a_death_gathers_plans_and_goes_on_and_the_owner_of_the_first_stage_hears_first() -> None:
    state, outputs = given(committed(training())[0], killed(0))
    (epoch,) = told(outputs)
    assert isinstance(epoch, EpochMessage) and epoch.commit == state.told
    assert (epoch.gather, epoch.regroup, epoch.go) == (True, True, None)
    assert outputs[1] == Tell((2, 1, 0), epoch)
    assert state.ballot is None
    state, outputs = given(state, *answers(state))
    assert kinds(tuple(told(outputs))) == [PlanMessage, GoMessage]
    assert kinds(tuple(written(outputs))) == [PlanRecord, GoRecord, DeadlyRecord], "no host is deadly any more"
    assert [each for each in outputs if isinstance(each, PhaseReached)] == [
        PhaseReached("inventory", 2),
        PhaseReached("plan", 2),
        PhaseReached("replay", 2),
    ]
    assert state.ballot is not None and (state.ballot.epoch, state.ballot.step) == (2, 1)


def test_an_order_that_is_repeated_is_told_once() -> None:
    """The protocol repeats its orders while the job stands still."""
    state, _ = given(training(), killed(0))
    quiet = [ClockTick(8 + number * S) for number in range(1, 3)]
    state, outputs = given(state, *quiet)
    assert outputs == ()
    state, _ = given(state, *answers(state))
    state, outputs = given(state, ClockTick(4 * S))
    assert outputs == ()


def test_a_vote_counts_in_its_epoch_only_and_in_no_gathering() -> None:
    state = training()
    late = votes_of(state)
    state, _ = given(state, killed(0))
    assert given(state, *late[2:]) == (state, ())
    state, _ = given(state, *answers(state))
    assert given(state, *late[2:])[1] == ()
    assert committed(state)[0].membership.committed == 0


def test_a_norm_that_is_not_finite_commits_nothing() -> None:
    state = training()
    with pytest.raises(DivergedError, match="gradient norm is inf at step 0"):
        given(state, *votes_of(state, norm=math.inf))


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_in_float16_such_a_step_is_skipped_by_all_and_by_the_next_coordinator(norm: float) -> None:
    half = training()
    half = half._replace(job=replace(half.job, dtype="float16"))
    state, outputs = given(half, *votes_of(half, norm=norm))
    assert told(outputs) == [CommitMessage(0, 0.0, "step")]
    (record,) = written(outputs)
    assert isinstance(record, CommitRecord) and (record.grad_norm, record.clip_factor) == (-1.0, 0.0)
    assert resume(state.job, documents(state), 9).told == CommitMessage(0, 0.0, "step")


def test_words_of_a_worker_that_is_out_count_for_nothing() -> None:
    state, _ = given(training(), killed(1))
    assert step(state, heard(1, messages.ReadyMessage())) == (state, ())


def test_relays() -> None:
    state = begun()
    cut = messages.CutMessage((0, 1, 2), ("fc1", "fc2", "fc3"))
    assert given(state, heard(0, cut))[1] == (
        Write(PartitionRecord(starts=cut.starts, layers=cut.layers)),
        Tell((0, 1, 2), messages.PartitionMessage(cut.starts)),
        Teach(messages.PartitionMessage(cut.starts)),
    )
    assert Note("3 are left out") in given(state, heard(0, replace(cut, notes=("3 are left out",))))[1]
    write, *_ = given(training(), heard(0, messages.SuspicionMessage(1, "reset by peer", 1)))[1]
    assert write == Write(SuspicionRecord(of=0, text="reset by peer", peer=1))


def border(*sizes: int) -> messages.BorderSpecs:
    return tuple(((2, size), "float32", True) for size in sizes)


def test_borders_are_those_that_the_stages_return_one_after_the_other() -> None:
    def learnt(stage: int, *before: messages.BorderSpecs, behind: messages.BorderSpecs) -> CoordinatorInput:
        return heard(stage, messages.BorderMessage(stage, before, behind))

    a, b, c = border(4), border(5), border(6)
    whole = messages.BordersMessage((a, b, c))
    everything = (Tell((0, 1, 2), whole), Teach(whole))
    state, outputs = given(begun(), learnt(0, behind=a))
    assert outputs == (Tell((0, 1, 2), messages.BordersMessage((a,))),), "all try their stages behind it"
    guessed, outputs = given(state, learnt(2, a, behind=a))
    assert outputs == (), "the border before stage 2 is not known"
    wrong, outputs = given(guessed, learnt(1, a, behind=b))
    assert outputs == (Tell((2,), messages.BordersMessage((a, b))),), "stage 2 was tried behind another one"
    assert given(wrong, learnt(2, a, behind=a))[1] == ()
    assert given(wrong, learnt(2, b, behind=c))[1] == everything
    _, outputs = given(guessed, learnt(1, a, behind=a))
    assert outputs == (Tell((0, 1, 2), messages.BordersMessage((a, a, a))), Teach(messages.BordersMessage((a, a, a))))


def test_a_validation_is_owed_until_its_result_is_known() -> None:
    state, _ = committed(training(validate_every=1))
    dead, _ = given(state, killed(0))
    assert told(given(dead, *answers(dead))[1])[-1] == GoMessage(end=False, validate=True)
    found = messages.Evaluation("test", 9, 0.7, {"f1": 0.5})
    state, outputs = given(state, heard(2, messages.ValidationMessage(0, (found,))))
    assert outputs == (
        Write(ValidationRecord(step=0, name="test", samples=9, loss=0.7, metrics={"f1": 0.5})),
        Tell((0, 1, 2), messages.ValidatedMessage(0)),
    )
    dead, _ = given(state, killed(0))
    assert told(given(dead, *answers(dead))[1])[-1] == GoMessage(end=False, validate=False)


def test_an_early_stop_is_in_the_store_before_a_worker_goes_on() -> None:
    def validated(state: CoordinatorState) -> tuple[CoordinatorState, tuple[CoordinatorOutput, ...]]:
        number = state.membership.committed
        result = heard(2, messages.ValidationMessage(number, (messages.Evaluation("test", 9, 0.7, {}),)))
        new, outputs = given(state, result)
        assert is_to_be_kept(state, new, result, outputs)
        after = resume(new.job, documents(new), 5 * S)
        assert (after.monitors, after.membership.last_step) == (new.monitors, new.membership.last_step)
        return new, outputs

    first = begun(validate_every=1)
    job = replace(first.job, early_stop="loss:1")
    state = begin(job, first.membership, 0)
    state, _ = given(state, *(heard(worker, messages.ReadyMessage()) for worker in range(3)))
    state, _ = validated(committed(state)[0])
    state, outputs = validated(committed(state)[0])
    assert (state.monitors.ends_at, state.membership.last_step) == (2, 2)
    assert outputs[-1] == Tell((0, 1, 2), messages.ValidatedMessage(1))
    dead, _ = given(state, killed(0))
    assert given(dead, heard(2, messages.ValidationMessage(1, ())))[0].monitors == state.monitors, "it comes again"
    state, outputs = committed(state)
    assert told(outputs)[0].then == "end"  # type: ignore[attr-defined]
    reason = "stopped early at step 2: validation/loss did not improve in 1 validation (best 0.7 after step 0)"
    assert written(outputs)[-1] == StoppedEarlyRecord(step=2, why=reason)


def test_workers_leave_when_all_have_finished() -> None:
    state, outputs = committed(training(last_step=0))
    assert told(outputs)[0].then == "end"  # type: ignore[attr-defined]
    assert (state.membership.phase, outputs[-1]) == (Phase.DRAINING, written_commit(outputs))
    assert (outputs[-3], type(outputs[-2])) == (KeepStep(0, 1), Tell), "parts are awaited before they can come"
    state, outputs = given(state, *(heard(worker, messages.FinishedMessage(1, (), 3, ())) for worker in range(3)))
    assert kinds(outputs) == [Write, Write, Write, Tell, Release]
    assert written(outputs)[0] == FinishedRecord(of=0, peak_stash=(), peak_memory_kib=3)
    assert (told(outputs), outputs[-1]) == ([ByeMessage()], Release(""))
    assert given(state, ClockTick(9 * S))[1] == (Tell((0, 1, 2), ByeMessage()),)


def written_commit(outputs: tuple[object, ...]) -> Write:
    (found,) = [each for each in outputs if isinstance(each, Write)]
    assert isinstance(found.record, CommitRecord) and found.record.last
    return found


def test_the_end_without_a_worker_names_its_reason() -> None:
    state, _ = committed(training(redundant=False, last_step=0))
    state, outputs = given(state, killed(1))
    assert kinds(outputs) == [Write, Note, Release]
    assert isinstance(written(outputs)[0], CutShortRecord)


def test_a_death_before_training_ends_the_run() -> None:
    state, outputs = given(begun(), killed(1))
    assert outputs == (Stop("training did not recover: worker 1 was killed (SIGKILL)"),)
    assert step(state, heard(0, messages.ReadyMessage())) == (state, ())


def test_a_coordinator_that_takes_over_after_a_death_before_training_ends_the_run() -> None:
    decided, _ = given(begun(), killed(1))
    after = resume(decided.job, documents(decided), 5 * S)
    _, outputs = step(after, Takeover(5 * S))
    assert outputs == (Stop("training did not recover: worker 1 was killed (SIGKILL)"),)


def test_a_death_before_training_restarts_the_workers_and_forgets_what_they_said() -> None:
    state = given(restartable(begun()), heard(0, messages.ReadyMessage()))[0]
    again, outputs = given(state, killed(1))
    why = "worker 1 was killed (SIGKILL)"
    assert outputs == (
        Write(RestartRecord(number=1, reason=why)),
        Note(f"{why} before the first commit; all workers are restarted (1 of at most 1)"),
        Restart(),
    )
    assert given(again, killed(0), heard(2, messages.ReadyMessage()), ClockTick(9 * S))[1] == (), "they are ended"
    other = resume(again.job, documents(again), 5 * S)
    assert step(other, Takeover(5 * S))[1] == outputs, "another coordinator restarts them too"
    started, outputs = given(again, JobRestart(6 * S))
    assert (outputs, started.membership.phase, started.membership.nodes) == ((), Phase.FORMING, {})
    outputs = given(started, *(heard(worker, messages.ReadyMessage()) for worker in range(3)))[1]
    assert kinds(tuple(told(outputs))) == [EpochMessage]
    assert isinstance(given(started, killed(1))[1][0], Stop), "it was restarted as often as allowed"


def test_a_restart_in_the_first_step_opens_its_ballot_again() -> None:
    state = restartable(training(redundant=False))
    late = votes_of(state)
    state, _ = given(state, late[0], killed(1), JobRestart(6 * S))
    state, outputs = given(state, *(heard(worker, messages.ReadyMessage()) for worker in range(3)))
    assert kinds(tuple(told(outputs))) == [EpochMessage]
    assert state.ballot is not None and (state.ballot.epoch, state.ballot.step, len(state.ballot.missing)) == (2, 0, 3)


def restartable(state: CoordinatorState) -> CoordinatorState:
    """Returns the coordinator of a job whose workers may be started again once."""
    options = replace(state.membership.options, max_restarts=1)
    return state._replace(membership=state.membership._replace(options=options))


def test_lost_state_ends_the_run_with_its_code() -> None:
    _, outputs = given(training(redundant=False), killed(1))
    (stop,) = outputs
    assert isinstance(stop, Stop) and stop.exit_code == ExitCode.STATE_LOST


def test_a_lost_node_takes_its_workers() -> None:
    state, _ = given(training(), LeaseExpired(7, "node-1"))
    assert state.membership.members == (0, 1)


def test_an_interrupted_job_ends_after_the_open_step() -> None:
    state, outputs = given(training(), Notice(6, None, 30 * S))
    assert outputs == () and state.membership.last_step == 0
    assert committed(state)[0].membership.phase is Phase.DRAINING


def test_nothing_is_decided_while_the_run_ends() -> None:
    state, _ = given(training(), RunStopping(6))
    assert given(state, killed(1))[0].membership == state.membership
    *others, last = votes_of(state)
    assert given(state, *others, last)[1] == ()


@pytest.mark.parametrize(
    ("cadence", "keeps", "steps", "kept"),
    [("10m", True, 2, 1), ("10m", False, 2, -1), ("10m", True, 0, -1), ("0", True, 2, -1)],
)
def test_the_last_step_is_kept_by_the_workers_that_are_left_at_the_end_of_a_run(
    cadence: str, keeps: bool, steps: int, kept: int
) -> None:
    """After an exception of the user's code all committed steps were lost, and the workers had them."""
    state = training(last_step=9)
    state = state._replace(job=replace(state.job, checkpoint_every=cadence))
    for _ in range(steps):
        state, _ = committed(state)
    _, outputs = given(state, RunStopping(6, keeps))
    owners = state.membership.owners if kept >= 0 else ()
    assert told(outputs) == [messages.StopMessage(kept, owners)]
    assert [each.step for each in outputs if isinstance(each, KeepStep)] == [kept] * (kept >= 0)


def test_a_checkpoint_of_the_last_step_that_was_ordered_before_is_only_waited_for() -> None:
    state = training(last_step=9)
    state = state._replace(job=replace(state.job, checkpoint_every="1"))
    state, _ = committed(state)
    assert told(given(state, RunStopping(6, keeps=True))[1]) == [messages.StopMessage(0)]


def test_last_words_are_answered_so_that_a_worker_that_may_go_does_not_wait() -> None:
    raised = messages.RaisedMessage(7, 0, exception())
    state, outputs = given(committed(training(last_step=9))[0], heard(1, raised))
    assert Tell((1,), messages.StopMessage()) in outputs
    _, outputs = given(state, RunStopping(8, keeps=True))  # its end has not been seen
    (stop,) = told(outputs)
    assert isinstance(stop, messages.StopMessage) and stop.keep == 0 and 1 not in stop.owners


def test_a_silent_worker_is_put_out_killed_and_named_with_its_heir() -> None:
    state = training()
    beats = [heard(worker, messages.HeartbeatMessage(1, 0, 1, False), 5 * S) for worker in (0, 1)]
    state, _ = given(state, *map(ClockTick, range(S // 4, 5 * S, S // 4)), *beats, ClockTick(5 * S))
    state, outputs = given(state, ClockTick(5 * S + S // 4, {2: Place(0, "2F1")}))
    assert Kill(2) in outputs
    (note,) = [each.text for each in outputs if isinstance(each, Note)]
    assert note.startswith("worker 2 has been silent for 5.2 s in 2F1 of step 0 and is evicted; worker 1 takes over")


def test_a_worker_that_is_out_is_killed_until_its_end_is_seen_and_hears_the_present_epoch() -> None:
    state = training()
    beats = [heard(worker, messages.HeartbeatMessage(1, 0, 1, False), 5 * S) for worker in (0, 1)]
    state, _ = given(state, *map(ClockTick, range(S // 4, 5 * S, S // 4)), *beats, ClockTick(5 * S))
    state, outputs = given(state, ClockTick(5 * S + S // 4))
    assert [each for each in outputs if isinstance(each, Kill)] == [Kill(2)]
    state, outputs = given(state, ClockTick(5 * S + S // 2))
    assert outputs == (), "it was ordered"
    state, outputs = given(state, ClockTick(5 * S + 3 * S // 4))
    assert outputs == (Kill(2),), "nothing moves"
    assert given(state, killed(2), *(ClockTick(5 * S + each * S // 4) for each in (4, 5)))[1] == ()
    late = heard(0, messages.FinishedMessage(1, (), 0, ()))
    assert state.epoch is not None and Tell((0,), state.epoch) in step(state, late)[1]


def leaving(grace_s: int = 120) -> CoordinatorState:
    return given(training(), Notice(6, 2, grace_s * S))[0]


def test_a_hand_over_that_all_have_prepared_is_one_decision_with_the_commit() -> None:
    state, outputs = given(training(), Notice(6, 2, 120 * S))
    near = WayOutRecord(of=2, way="boundary", step=0, text="hands over at the boundary after step 0")
    assert written(outputs) == [NoticeRecord(of=2, grace_s=120.0), near]
    assert outputs[-1] == Note(f"worker 2 {near.text}")
    orders = [each for each in told(outputs) if isinstance(each, PreparePartMessage)]
    assert len(orders) == len(told(outputs)) == 3
    state, outputs = given(state, heard(1, WholePlanMessage(2)), heard(1, WholePlanMessage(3)))
    (whole,) = told(outputs)
    assert isinstance(whole, PrepareMessage) and whole.plan.repair is not None and whole.plan.epoch == 2
    assert {(each.number, each.part.digest) for each in orders} == {
        (whole.number, both_digests(whole.plan, whole.plan.repair))
    }
    assert [(worker, each.holds) for worker, each in enumerate(orders)] == [*whole.plan.inventories]
    state, outputs = given(state, *(heard(each, PreparedMessage(2, whole.number, "plan")) for each in range(3)))
    assert outputs == ()
    state, outputs = committed(state)
    commit, epoch = told(outputs)[:2]
    assert isinstance(commit, CommitMessage) and commit.then == "epoch"
    assert isinstance(epoch, EpochMessage)
    assert (epoch.commit, epoch.digest, epoch.gather, epoch.go) == (commit, "plan", False, GoMessage(False, False))
    assert [type(each) for each in written(outputs)] == [CommitRecord, EpochRecord, PlanRecord, GoRecord]
    assert (state.membership.phase, state.membership.epoch) == (Phase.RUNNING, 2)
    assert state.ballot is not None and (state.ballot.epoch, state.ballot.step) == (2, 1)


def test_a_worker_that_no_other_can_replace_is_told_to_stay_once() -> None:
    state, outputs = given(training(redundant=False), Notice(6, 1, 9 * S))
    text = "is to leave within 9 s, but no other worker can take over stage 1"
    assert outputs[1:] == (Note(f"worker 1 {text}"), Write(StaysRecord(of=1, text=text)))
    assert len(given(state, Notice(7, 1, 9 * S))[1]) == 1


def test_an_input_that_only_a_bug_can_cause_is_an_error() -> None:
    with pytest.raises(InvariantError, match="FinishedMessage while forming"):
        given(begun(), heard(0, messages.FinishedMessage(0, (), 0, ())))


def test_what_is_kept() -> None:
    """An answer without an effect is asked for again, and votes come again in the next epoch."""
    state = training()
    state, outputs = given(state, killed(0))
    first, *_ = answers(state)
    new, outputs = step(state, first)
    assert not is_to_be_kept(state, new, first, outputs)
    beat = heard(1, messages.HeartbeatMessage(2, 0, 3, True))
    assert not is_to_be_kept(state, *_with(state, beat))
    notice = Notice(8, 1, S)
    assert is_to_be_kept(state, *_with(state, notice))
    running = training()
    *others, last = votes_of(running)
    assert not is_to_be_kept(running, *_with(running, others[0]))
    almost, _ = given(running, *others)
    assert is_to_be_kept(almost, *_with(almost, last))


def _with(
    state: CoordinatorState, one: CoordinatorInput
) -> tuple[CoordinatorState, CoordinatorInput, tuple[CoordinatorOutput, ...]]:
    new, outputs = step(state, one)
    return new, one, outputs


def test_what_is_kept_is_enough_to_go_on() -> None:
    """The next coordinator knows the commit that may not have been told, and has the votes come again."""
    state, _ = committed(training(validate_every=2))
    state, _ = given(state, heard(2, messages.RaisedMessage(7, 1, exception())), killed(2, 1))
    kept = documents(state)
    found = resume(state.job, kept, 1000 * S)
    assert documents(found) == kept
    assert (found.commit, found.started, found.raised, found.codes) == (state.commit, 1, state.raised, {2: 1})
    assert found.told == state.told
    assert (found.ballot, found.epoch) == (None, None)
    assert found.membership.decided() == state.membership.decided()


def test_a_coordinator_that_takes_over_tells_the_commit_again_and_has_the_votes_come_again() -> None:
    state, _ = committed(training())
    state, _ = given(state, *votes_of(state)[:3])
    found = resume(state.job, documents(state), 1000 * S)
    new, outputs = step(found, Takeover(1001 * S))
    (commit, epoch_record) = written(outputs)
    assert isinstance(commit, CommitRecord) and (commit.step, commit.loss) == (0, 0.5)
    assert isinstance(epoch_record, EpochRecord) and (epoch_record.epoch, epoch_record.verdict) == (2, ())
    (epoch,) = told(outputs)
    assert isinstance(epoch, EpochMessage) and (epoch.commit, epoch.regroup) == (state.told, True)
    new, _ = given(new, *answers(new))
    assert new.ballot is not None and (new.ballot.epoch, new.ballot.step, len(new.ballot.missing)) == (2, 1, 6)
    assert committed(new)[0].membership.committed == 1


@pytest.mark.parametrize("facts", ["[]", "{", '{"started": 1}'])
def test_garbage_in_the_store_is_named(facts: str) -> None:
    state = training()
    with pytest.raises(InvariantError, match="invalid facts of a coordinator"):
        resume(state.job, documents(state) | {"facts": facts}, 0)


def exception(error: str = "RuntimeError: planted") -> WorkerException:
    return WorkerException(error, "layer 2 (fc2)", "mine.py", 31, "forward")


def test_an_exception_before_training_fails_the_run() -> None:
    raised = messages.RaisedMessage(7, 0, exception())
    outputs = given(begun(), heard(1, raised))[1]
    assert written(outputs)[0].step == -1  # type: ignore[attr-defined]
    assert outputs[1:] == (Fail(1, raised, False),)


def told_commits(cadence: str, times_s: list[int], last_step: int = 9) -> list[bool]:
    """Returns for each commit, at these times, whether its state is kept."""
    state = training(last_step=last_step)
    state = state._replace(job=replace(state.job, checkpoint_every=cadence))
    found = []
    for time_s in times_s:
        state, outputs = committed(state, time_s * S)
        (commit,) = (each for each in told(outputs) if isinstance(each, CommitMessage))
        found.append(commit.keep)
    return found


def test_commits_are_kept_by_steps_by_time_and_at_the_end() -> None:
    assert told_commits("2", [1, 2, 3, 4, 5], last_step=4) == [False, True, False, True, True]
    assert told_commits("10s", [1, 11, 12, 20, 22, 23], last_step=5) == [False, True, False, False, True, True]
    assert told_commits("end", [1, 2, 3], last_step=2) == [False, False, True]
    assert told_commits("0", [1, 2, 3], last_step=2) == [False, False, False]


def test_the_last_step_of_an_interrupted_run_is_kept() -> None:
    state, _ = committed(training())
    state, _ = step(state, Notice(7, None, S))
    _, outputs = committed(state)
    (commit,) = (each for each in told(outputs) if isinstance(each, CommitMessage))
    assert (commit.step, commit.then, commit.keep) == (1, "end", True)


def test_a_kept_commit_is_kept_by_the_next_coordinator_and_in_the_next_epoch() -> None:
    state = training()
    state = state._replace(job=replace(state.job, checkpoint_every="1"))
    state, _ = committed(state)
    resumed = resume(state.job, documents(state), 9)
    assert resumed.told == state.told
    assert resumed.kept == 0
    state, outputs = given(resumed, Takeover(10))
    (epoch,) = (each for each in told(outputs) if isinstance(each, EpochMessage))
    assert epoch.commit is not None
    assert epoch.commit.keep
    _, outputs = given(state, *answers(state))
    (go,) = (each for each in told(outputs) if isinstance(each, GoMessage))
    assert go.keep
