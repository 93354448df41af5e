"""The membership protocol: the table pair by pair, and the life of a job, event by event."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from engine.codec.documents import state_of, state_text
from engine.core.errors import ExitCode, Impossible, InvariantError
from engine.core.exclusion import Cause, Exclusion, Position, excluded
from engine.core.message_kinds import Message
from engine.core.messages import FinishedMessage
from engine.core.program.inventory import InventoryMessage, PlanMessage, PlannedMessage
from engine.core.protocol.events import (
    Departure,
    EarlyStop,
    Event,
    ExitSeen,
    HandOver,
    JobRestart,
    LeaseExpired,
    Notice,
    StepCommitted,
    Takeover,
    Tick,
)
from engine.core.protocol.membership import TABLE, is_ignored, plan_document, step
from engine.core.protocol.state import GATHERING, Edge, Phase, Sighting, State, by_suspicion
from engine.core.protocol.verdicts import leavers
from tests.core.membership_cases import (
    JOINED,
    S,
    beats,
    committed,
    forming,
    holds,
    in_phase,
    is_done,
    plans,
    recovered,
    running,
    sample,
    suspects,
    told,
)
from tests.looped import looped

BEATS = beats(1, 2, 0, 0, 0, False)
KINDS = tuple(dict.fromkeys(kind for _, kind in TABLE))
PAIRS = [(phase, kind) for phase in Phase for kind in KINDS]
IMPOSSIBLE = {
    *((Phase.FORMING, kind) for kind in (InventoryMessage, PlannedMessage, StepCommitted, FinishedMessage)),
    *((Phase.FORMING, kind) for kind in (HandOver, Departure, EarlyStop)),
    *((phase, JobRestart) for phase in (Phase.RUNNING, *GATHERING, Phase.DRAINING)),
    *((phase, FinishedMessage) for phase in (Phase.RUNNING, Phase.FAILING_OVER, Phase.RECONFIGURING)),
}


def halt(state: State) -> State:
    """Returns a job that has halted."""
    assert state.phase is Phase.HALTED
    return state


def test_every_pair_is_listed() -> None:
    assert set(TABLE) == set(PAIRS)
    assert {pair for pair, rule in TABLE.items() if isinstance(rule, Impossible)} == IMPOSSIBLE


@looped(("phase", "kind"), PAIRS)
def test_a_pair_does_what_the_table_says(phase: Phase, kind: type[Event] | type[Message]) -> None:
    state = in_phase(phase)
    assert state.phase is phase
    event = sample(kind, state)
    rule = TABLE[phase, kind]
    if isinstance(rule, Impossible):
        with pytest.raises(InvariantError, match=re.escape(f"while {phase}: {rule.reason}")):
            step(state, event)
        return
    new = step(state, event)
    assert new.phase in (phase, *rule.leads_to)
    if kind is Takeover:
        return  # each one is another coordinator
    assert step(new, event).decided() == new.decided(), "an event that is repeated decides nothing"


@looped("phase", [Phase.FINISHED, Phase.HALTED])
@looped("kind", KINDS)
def test_nothing_changes_a_job_that_has_ended(phase: Phase, kind: type[Event] | type[Message]) -> None:
    state = in_phase(phase)
    assert step(state, sample(kind, state)) == state


def test_the_last_to_join_starts_the_first_epoch() -> None:
    assert told(forming(), *JOINED[:2]).phase is Phase.FORMING
    state = told(forming(), *JOINED)
    assert (state.phase, state.epoch) == (Phase.RUNNING, 1)
    assert (state.members, state.verdict, state.reason) == ((0, 1, 2), (), "every worker has joined")


def test_the_first_step_begins_when_all_have_joined() -> None:
    assert committed(running(), now_ns=20).steps_ns == (18,), "the start of the workers is no part of a usual step"


def test_a_job_without_a_fault() -> None:
    state = step(running(last_step=1), StepCommitted(5, 1, 0))
    assert (state.phase, state.committed) == (Phase.RUNNING, 0)
    state = step(state, StepCommitted(6, 1, 1))
    assert (state.phase, state.committed) == (Phase.DRAINING, 1)
    state = told(state, is_done(7, 0, 1), is_done(7, 1, 1))
    assert state.phase is Phase.DRAINING
    assert step(state, is_done(8, 2, 1)).phase is Phase.FINISHED


def test_a_death_is_gathered_planned_and_resumed() -> None:
    state = committed(told(running(), beats(3, 1, 1, 1, 7, inside=True)))
    state = step(state, ExitSeen(30, 1, -9))
    why = "was killed (SIGKILL), in an action of step 1"
    out = Exclusion(1, why, Cause.DEATH, Position(1, 7, waiting=False))
    assert (state.phase, state.epoch) == (Phase.FAILING_OVER, 2)
    assert (state.members, state.verdict, state.reason) == ((0, 2), (out,), f"worker 1 {why}")
    state = told(state, holds(31, 2, 2, "two"), holds(32, 0, 2, "none"))
    inventories = ((0, "none"), (2, "two"))
    document = PlanMessage(2, 0, (0, 2), (), (0, 0, 2), ((2,), (), ()), inventories, hosts=(0, 1), before=(0, 1, 2))
    assert plan_document(state) == document
    state = told(state, plans(33, 0, 2, "same"))
    assert state.phase is Phase.FAILING_OVER
    assert step(state, plans(34, 2, 2, "same")).phase is Phase.RUNNING


def test_a_death_while_gathering_begins_again() -> None:
    state = running()._replace(shadows=((2, 1), (0, 2), (1, 0)))
    state = told(state, ExitSeen(30, 1, -9), holds(31, 0, 2, "held"), holds(31, 2, 2, "held"))
    state = told(state, plans(32, 0, 2, "plan"), ExitSeen(33, 0, -9))
    assert (state.phase, state.epoch, state.owners) == (Phase.FAILING_OVER, 3, (2, 2, 2))
    assert (state.inventories, state.digests) == ({}, {})
    assert recovered(state).phase is Phase.RUNNING


def test_the_owners_when_the_step_began_stay_known_through_several_deaths() -> None:
    """A step begins with the owners of the last commit, whoever dies in it."""
    state = running()._replace(shadows=((2, 1), (0, 2), (1, 0)))
    for number, victim in ((30, 1), (33, 0)):
        state = told(state, ExitSeen(number, victim, -9))
        assert (state.began, state.owners != state.began) == ((0, 1, 2), True)
    state = committed(recovered(state))
    assert state.began == state.owners == (2, 2, 2)


def test_an_inventory_freezes() -> None:
    state = told(running(), ExitSeen(30, 1, -9))
    assert step(state, StepCommitted(31, 2, 0)) == state


def test_only_the_next_step_is_committed() -> None:
    state = running()
    for number in (-1, 1):
        assert step(state, StepCommitted(5, 1, number)) == state


def test_whoever_ends_before_it_is_done_has_died() -> None:
    state = told(in_phase(Phase.DRAINING), is_done(30, 0, 1))
    assert told(state, ExitSeen(31, 0, 0)).phase is Phase.DRAINING
    state = told(state, ExitSeen(31, 0, 0), ExitSeen(32, 1, 0))
    assert state.phase is Phase.FINISHED, "worker 0, the shadow of stage 1, has left too, but every step is committed"
    assert "worker 0 had finished and left; worker 1 exited with code 0" in state.reason


def test_a_death_after_the_last_commit_is_failed_over() -> None:
    state = told(in_phase(Phase.DRAINING), is_done(30, 0, 1), ExitSeen(31, 1, -15))
    assert state.phase is Phase.FAILING_OVER
    state = recovered(state)
    assert state.phase is Phase.DRAINING
    assert told(state, is_done(40, 0, 2), is_done(40, 2, 2)).phase is Phase.FINISHED


@pytest.mark.parametrize("gathering", [False, True])
def test_whatever_is_lost_after_the_last_commit_the_job_has_finished(gathering: bool) -> None:
    """Nobody is waited for who cannot come: what is missing is said, and every step is committed."""
    state = in_phase(Phase.DRAINING)
    state = told(state, ExitSeen(30, 1, -9)) if gathering else state._replace(shadows=((), (), ()))
    state = step(state, ExitSeen(31, 2, -9))
    lost = "the state of stage 2 is lost in epoch {}; last committed step 0; worker 2 was killed (SIGKILL)"
    assert state.reason == lost.format(state.epoch)
    assert (state.phase, state.exit_code, state.lost_stages) == (Phase.FINISHED, 0, (2,))


def test_a_plan_that_lacks_a_stage_after_the_last_commit_ends_nothing() -> None:
    state = told(in_phase(Phase.DRAINING), ExitSeen(30, 1, -9), holds(31, 0, 2, ""), holds(31, 2, 2, ""))
    state = told(state, *(plans(32, worker, 2, "plan", lost_stages=(1,)) for worker in (0, 2)))
    assert (state.phase, state.lost_stages) == (Phase.FINISHED, (1,))


def test_with_nobody_left_the_job_has_finished_too() -> None:
    state = told(in_phase(Phase.DRAINING), *(ExitSeen(30 + worker, worker, -9) for worker in range(3)))
    assert state.phase is Phase.FINISHED
    assert state.reason and len(state.done) < len(state.members)


def test_a_lost_stage_ends_the_job() -> None:
    state = told(committed(running()), ExitSeen(30, 1, -9), ExitSeen(31, 2, -9))
    assert state.phase is Phase.FAILING_OVER, "worker 0 has not said yet what it holds"
    end = halt(told(state, holds(32, 0, 3, "", (0, 1))))
    assert (end.epoch, end.committed, end.exit_code, end.lost_stages) == (3, 0, ExitCode.STATE_LOST, (2,))
    why = "the state of stage 2 is lost in epoch 3; last committed step 0; worker 2 was killed (SIGKILL)"
    assert end.reason == why


def test_a_replica_that_was_healed_in_the_open_step_takes_over() -> None:
    """Worker 1 is out; worker 0 gets a replica of stage 2 in the next step, and worker 2 dies before its commit."""
    state = committed(recovered(told(running(), ExitSeen(30, 1, -9)), 31), now_ns=32)
    state = told(state, ExitSeen(40, 2, -9))
    assert (state.phase, state.owners) == (Phase.FAILING_OVER, (0, 0, 2))
    assert told(state, holds(41, 0, 3, "", (0, 1))).phase is Phase.HALTED, "what it has got was not whole"
    document = plan_document(told(state, holds(41, 0, 3, "held", (0, 1, 2))))
    assert (document.owners, document.shadows) == ((0, 0, 0), ((), (), ()))


def test_a_replica_that_was_healed_in_the_open_step_is_a_shadow_in_the_plan() -> None:
    """Nobody throws a live replica away: the owner may be the next to die."""
    state = told(
        running(),
        ExitSeen(30, 1, -9),
        holds(31, 0, 2, "", (0, 1, 2)),
        holds(31, 2, 2, "", (0, 2)),
    )
    assert (state.owners, state.shadows) == ((0, 0, 2), ((2,), (), (0,)))
    assert state_of(state_text(state), 0).decided() == state.decided()


def test_whoever_stays_takes_over_before_one_who_is_leaving() -> None:
    state = told(running()._replace(shadows=((), (), ())), Notice(5, 0, S), ExitSeen(30, 1, -9))
    state = told(state, holds(31, 0, 2, "", (0, 1)), holds(31, 2, 2, "", (1, 2)))
    assert (state.owners, state.shadows) == ((0, 2, 2), ((), (0,), ()))


def test_when_nobody_is_left_nobody_is_waited_for() -> None:
    state = told(running(), *(ExitSeen(30, worker, -9) for worker in range(3)))
    assert (halt(state).exit_code, halt(state).lost_stages) == (ExitCode.STATE_LOST, (0, 1, 2))


def test_without_redundancy_every_death_ends_the_job() -> None:
    end = halt(told(running(redundant=False), ExitSeen(30, 1, 1)))
    assert (end.exit_code, end.lost_stages) == (ExitCode.STATE_LOST, (1,))
    assert end.reason == "the state of stage 1 is lost in epoch 2; last committed step -1; worker 1 exited with code 1"


def test_a_plan_that_lacks_a_stage_ends_the_job() -> None:
    state = told(running(), ExitSeen(30, 1, -9), holds(31, 0, 2, ""), holds(31, 2, 2, ""))
    lacking = [plans(32, worker, 2, "plan", lost_stages=(1,)) for worker in (0, 2)]
    assert told(state, lacking[0]).phase is Phase.FAILING_OVER
    end = halt(told(state, *lacking))
    assert (end.exit_code, end.lost_stages) == (ExitCode.STATE_LOST, (1,))


def test_different_plans_end_the_job() -> None:
    state = told(running(), ExitSeen(30, 1, -9), holds(31, 0, 2, ""), holds(31, 2, 2, ""))
    end = halt(told(state, plans(32, 2, 2, "a"), plans(33, 0, 2, "b")))
    assert (end.exit_code, end.reason) == (ExitCode.INTERNAL, "workers 0 and 2 made different plans for epoch 2")


def test_a_plan_before_the_inventories_counts_for_nothing() -> None:
    state = told(running(), ExitSeen(30, 1, -9), holds(31, 0, 2, ""))
    assert step(state, plans(32, 0, 2, "plan")) == state


def test_a_suspicion_is_looked_into() -> None:
    state = step(running(), suspects(5, 2, 1, peer=1))
    assert (state.epoch, state.look) == (1, (Edge(2, 1),))
    assert step(state, suspects(6, 2, 1, peer=1)) == state, "it is known"
    state = told(state, suspects(6, 0, 1, peer=2))
    assert state.looked_ns == 5, "the look does not begin again"
    dead = told(state, ExitSeen(6, 0, -9))
    assert dead.verdict == (excluded(0, Cause.DEATH, "was killed (SIGKILL)"),)
    look_ns = state.options.look_ns
    assert told(state, Tick(4 + look_ns)).epoch == 1
    state = told(state, Tick(5 + look_ns))
    assert (state.epoch, state.members, state.verdict) == (2, (0, 1, 2), ())
    assert state.reason == "a transfer failed at workers 1 and 2, but no worker has died"


def suspected(state: State) -> State:
    """Returns a job after an empty verdict on workers 1 and 2, and the recovery from it."""
    look_ns, now_ns = state.options.look_ns, state.ticked_ns
    state = told(state, suspects(now_ns, 1, state.epoch, 2), Tick(now_ns + look_ns))
    return recovered(state, now_ns + look_ns) if state.phase is Phase.FAILING_OVER else state


@looped(
    ("edges", "order"),
    [
        ([(1, 2)], (2, 1)),
        ([(2, 1)], (1, 2)),
        ([(1, 2), (2, 1)], (2, 1)),
        ([(1, 0), (1, 2)], (1, 2, 0)),
        ([(1, 0), (2, 1), (2, 3)], (1, 2, 3, 0)),
        ([(0, 2), (1, 2), (2, 1)], (2, 1, 0)),
        ([(1, 1)], (1,)),
    ],
)
def test_the_end_with_the_most_edges_is_suspected_before_one_that_only_reports(
    edges: list[tuple[int, int]], order: tuple[int, ...]
) -> None:
    assert by_suspicion([Edge(*edge) for edge in edges]) == order


def test_a_worker_that_reports_is_not_the_one_given_up() -> None:
    state = running()
    for _ in range(3):
        now_ns, look_ns = state.ticked_ns, state.options.look_ns
        state = told(state, suspects(now_ns, 2, state.epoch, 1), Tick(now_ns + look_ns))
        state = recovered(state, now_ns + look_ns)
    assert state.members == (0, 2)


def test_a_pair_that_fails_again_and_again_loses_one() -> None:
    state = suspected(suspected(running()))
    assert (state.epoch, state.members) == (3, (0, 1, 2))
    given_up = suspected(state)
    why = "is given up: a transfer failed at workers 1 and 2, 3 times in a row"
    assert given_up.verdict == (excluded(2, Cause.GIVEN_UP, why),)
    assert ([*given_up.out], given_up.exited) == ([2], ()), "its process lives"
    forgiven = suspected(committed(state, now_ns=state.ticked_ns))
    assert forgiven.members == (0, 1, 2), "a commit proves that they can talk"


def test_of_a_pair_the_one_is_given_up_whose_slots_others_have() -> None:
    state = suspected(suspected(running()))._replace(shadows=((2,), (0,), ()))
    assert suspected(state).members == (0, 2)


def test_where_nothing_can_be_repeated_the_first_empty_verdict_ends_the_job() -> None:
    end = halt(suspected(running(redundant=False, max_repeats=0)))
    assert end.exit_code == ExitCode.NOT_RECOVERED
    assert end.reason == "training did not recover: a transfer failed at workers 1 and 2"


def test_a_standstill_is_an_empty_verdict_and_in_the_end_a_halt() -> None:
    state = running()._replace(sightings={})
    for epoch in (2, 3):
        state = told(state._replace(ticked_ns=(epoch - 1) * 61 * S), Tick((epoch - 1) * 61 * S))
        assert (state.epoch, state.members) == (epoch, (0, 1, 2))
        state = recovered(state, state.moved_ns)
    end = halt(told(state._replace(ticked_ns=3 * 61 * S), Tick(3 * 61 * S)))
    assert end.reason == "training did not recover: no worker moved within 60.0 s, 3 times in a row"


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (told(forming(), *JOINED[:2], BEATS), "did not join within 60.0 s"),
        (told(forming(), *JOINED[:2]), "did not send a message within 60.0 s"),
        (
            told(running(), ExitSeen(5, 1, -9), holds(6, 0, 2, "")),
            "did not report its inventory within 10.0 s",
        ),
        (
            told(
                running()._replace(shadows=((2,), (0,), (1, 0))),
                ExitSeen(5, 1, -9),
                holds(6, 0, 2, ""),
                holds(6, 2, 2, ""),
                plans(6, 0, 2, ""),
            ),
            "did not make the plan within 10.0 s",
        ),
    ],
)
def test_whoever_owes_an_answer_at_the_deadline_is_out(state: State, why: str) -> None:
    late_ns = 61 * S
    sightings = {worker: Sighting(late_ns, late_ns) for worker in state.sightings}
    state = told(state._replace(ticked_ns=late_ns, sightings=sightings), Tick(late_ns))
    assert state.verdict == (excluded(2, Cause.NO_ANSWER, why),)


def test_a_worker_that_is_out_is_evicted_until_its_exit_is_seen() -> None:
    state = told(running()._replace(ticked_ns=6 * S), *(beats(6 * S, each, 1, 0, 1, False) for each in (0, 1)))
    state = told(state, Tick(6 * S))
    assert state.out[2].why == "has been silent for 6.0 s"
    assert state.exited == ()
    assert told(state, ExitSeen(6 * S, 2, -9)).exited == (2,)


def test_nobody_listens_to_whoever_is_out_or_speaks_of_an_old_epoch() -> None:
    state = told(running(), ExitSeen(5, 1, -9))
    for word in (JOINED[1], beats(6, 1, 9, 9, 9, True), holds(6, 1, 2, ""), is_done(6, 1, 1)):
        assert is_ignored(state, word) and step(state, word) == state
    assert is_ignored(state, is_done(6, 0, 1)) and step(state, is_done(6, 0, 1)) == state
    assert step(state, StepCommitted(6, 1, 0)) == state
    assert step(state, beats(6, 7, 1, 0, 0, True)) == state, "a newcomer that is still being started"


def test_a_coordinator_that_was_replaced_ignores_what_it_does_not_know() -> None:
    for word in (holds(6, 1, 2, ""), is_done(6, 1, 2), StepCommitted(6, 2, 0)):
        assert step(running(), word) == running()


def test_a_node_takes_all_its_workers_with_it() -> None:
    state = running()._replace(shadows=((2,), (2,), (1,)))
    state = told(state, LeaseExpired(5, "node-0"))
    assert (state.members, state.owners) == ((2,), (2, 2, 2))
    assert state.reason == ("worker 0 was on host node-0, which is lost; worker 1 was on host node-0, which is lost")
    assert {each.cause for each in state.verdict} == {Cause.NODE_LOST}
    assert state.exited == (0, 1), "nobody is left there to end them"
    assert step(state, LeaseExpired(6, "node-0")) == state


def test_a_hand_over_is_made_before_the_break() -> None:
    state = step(running(), Notice(5, 2, 120 * S))
    assert (state.epoch, leavers(state)) == (1, (2,))
    state = step(state, StepCommitted(6, 1, 0))
    assert (state.phase, state.epoch) == (Phase.RECONFIGURING, 2)
    assert (state.members, state.verdict, state.planned) == ((0, 1, 2), (), True)
    assert state.reason == "worker 2 handed over after step 0"
    state = recovered(state)
    state = committed(state)
    assert (state.phase, state.members) == (Phase.RUNNING, (0, 1, 2)), "it is the only shadow of stages 0 and 2"
    state = step(state, StepCommitted(7, 2, 2, shadows=((1,), (0,), (0,))))
    left = excluded(2, Cause.LEFT, "has left after step 2")
    assert (state.phase, state.epoch) == (Phase.RECONFIGURING, 3)
    assert (state.members, state.verdict, state.planned) == ((0, 1), (left,), True)
    assert state.reason == "worker 2 has left after step 2"
    assert recovered(state).phase is Phase.RUNNING


def test_with_too_little_grace_a_hand_over_is_a_kill() -> None:
    state = told(running(), Notice(5, 2, 1), ExitSeen(6, 2, -9))
    assert (state.phase, state.owners) == (Phase.FAILING_OVER, (0, 1, 1))


def test_without_a_shadow_there_is_no_hand_over() -> None:
    state = step(running(redundant=False), Notice(5, 2, 120 * S))
    assert state.epoch == 1
    assert committed(state).phase is Phase.RUNNING


def test_a_notice_during_a_recovery_is_taken_up_after_it() -> None:
    state = told(running()._replace(shadows=((2,), (0,), (1, 0))), ExitSeen(5, 1, -9), Notice(6, 2, S))
    assert leavers(recovered(state)) == (2,)


@pytest.mark.parametrize(
    ("phase", "last_step"), [(Phase.RUNNING, 0), (Phase.FAILING_OVER, 0), (Phase.RECONFIGURING, 0)]
)
def test_a_job_that_is_stopped_finishes_its_step(phase: Phase, last_step: int) -> None:
    state = told(in_phase(phase), Notice(40, None, S))
    assert state.last_step == last_step
    if phase is Phase.RECONFIGURING:
        assert recovered(state).phase is Phase.DRAINING, "at a boundary there is no step to finish"


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.RESTARTING])
def test_a_job_that_is_stopped_before_its_first_step_halts(phase: Phase) -> None:
    assert halt(told(in_phase(phase), Notice(5, None, S))).exit_code == ExitCode.TERMINATED


@pytest.mark.parametrize(("stopped", "end"), [(False, Phase.HALTED), (True, Phase.FINISHED)])
def test_a_stage_that_is_lost_at_a_hand_over_ends_the_job(stopped: bool, end: Phase) -> None:
    state = told(in_phase(Phase.RECONFIGURING), *([Notice(29, None, S)] if stopped else []))
    assert told(state, *(ExitSeen(30 + worker, worker, -9) for worker in range(3))).phase is end


def test_orders_are_repeated_when_nothing_moves() -> None:
    state = running()
    repeat_ns = state.options.repeat_ns
    assert told(state, Tick(repeat_ns)).repeated_ns == 0
    late = 2 + repeat_ns
    state = told(state, Tick(2))
    assert told(state, Tick(late)).repeated_ns == late
    assert told(state, Tick(late), Tick(late + 1)).repeated_ns == late
    assert told(state, Tick(late), Tick(late + repeat_ns)).repeated_ns == late + repeat_ns
    assert told(state, beats(3 + late, 0, 1, 0, 1, True), Tick(late + repeat_ns)).repeated_ns == 0


def restartable(state: State, most: int = 2) -> State:
    """Returns a job whose workers may be started again."""
    return state._replace(options=replace(state.options, max_restarts=most))


@pytest.mark.parametrize("redundant", [True, False])
def test_a_death_before_training_restarts_the_workers_a_few_times(redundant: bool) -> None:
    state = restartable(forming(redundant))
    for number in (1, 2):
        state = told(state, *JOINED[:1], ExitSeen(5, 1, -9))
        assert (state.phase, state.epoch) == (Phase.RESTARTING, 0)
        assert (state.restarts, state.reason) == (number, "worker 1 was killed (SIGKILL)")
        assert told(state, ExitSeen(6, 0, -9)) == state, "the others are ended"
        state = told(state, JobRestart(7))
        assert (state.phase, state.nodes, state.exited, state.epoch) == (Phase.FORMING, {}, (), 0)
    assert told(state, *JOINED).phase is Phase.RUNNING
    ended = told(state, ExitSeen(9, 1, -9))
    assert ended.phase is (Phase.FAILING_OVER if redundant else Phase.HALTED)


def test_a_death_before_the_first_commit_restarts_the_workers_if_there_is_no_heir() -> None:
    state = restartable(running(redundant=False))
    again = told(state, ExitSeen(5, 1, -9), JobRestart(7))
    assert (again.phase, again.members, again.owners) == (Phase.FORMING, (0, 1, 2), (0, 1, 2))
    assert told(again, *JOINED).epoch == 2
    assert told(committed(state), ExitSeen(5, 1, -9)).phase is Phase.HALTED
    assert told(restartable(running()), ExitSeen(5, 1, -9)).phase is Phase.FAILING_OVER


@pytest.mark.parametrize("state", [told(forming(), *JOINED[:2]), running(redundant=False)], ids=["start", "step 0"])
def test_a_node_that_is_lost_before_the_first_commit_restarts_the_workers_on_others(state: State) -> None:
    again = told(restartable(state), LeaseExpired(5, "node-0"))
    assert (again.phase, again.members, again.restarts) == (Phase.RESTARTING, (0, 1, 2), 1)
    assert "host node-0, which is lost" in again.reason
    begun = told(again, JobRestart(7, ((2,), (0,), (1,))))  # the shadows stand on other hosts now
    assert (begun.phase, begun.shadows, begun.nodes) == (Phase.FORMING, ((2,), (0,), (1,)), {})
    assert told(state, LeaseExpired(5, "node-0")).phase is not Phase.RESTARTING, "as often as allowed"


def test_a_node_without_a_joined_worker_has_no_say_before_training() -> None:
    state = restartable(told(forming(), *JOINED[:2]))
    assert told(state, LeaseExpired(5, "node-1")) == state
    assert told(restartable(running()), LeaseExpired(5, "node-1")).phase is Phase.FAILING_OVER, "there are heirs"


def test_an_exception_before_the_first_commit_would_come_again() -> None:
    state = restartable(running(redundant=False))
    assert told(state, ExitSeen(5, 1, 3, "raised ValueError")).phase is Phase.HALTED


@pytest.mark.parametrize("phase", [Phase.FINISHED, Phase.HALTED])
def test_the_end_is_repeated_too(phase: Phase) -> None:
    assert told(in_phase(phase), Tick(S)).repeated_ns == S


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.FAILING_OVER, Phase.RECONFIGURING, Phase.DRAINING])
def test_another_coordinator_asks_all_members_again(phase: Phase) -> None:
    state = in_phase(phase)
    new = step(state_of(state_text(state), 40), Takeover(40))
    assert (new.phase, new.epoch, new.verdict, new.planned) == (Phase.FAILING_OVER, state.epoch + 1, (), False)
    assert (new.members, new.owners, new.committed, new.out) == (
        state.members,
        state.owners,
        state.committed,
        state.out,
    )
    assert recovered(new).phase is (Phase.DRAINING if phase is Phase.DRAINING else Phase.RUNNING)


def on_nodes(state: State) -> State:
    return state._replace(nodes={0: "a", 1: "b", 2: "c"})


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.FAILING_OVER, Phase.RECONFIGURING])
def test_a_take_over_from_a_lost_host_is_the_one_verdict_on_its_workers(phase: Phase) -> None:
    state = on_nodes(in_phase(phase))
    new = told(state, Takeover(40, lost="b"))
    left = tuple(worker for worker in state.members if worker != 1)
    assert (new.phase, new.epoch, new.members) == (Phase.FAILING_OVER, state.epoch + 1, left)
    assert [(out.worker, out.cause) for out in new.verdict] == [(1, Cause.NODE_LOST)]
    assert told(new, LeaseExpired(41, "b")) == new
    assert told(new, ExitSeen(42, 1, -9)).epoch == new.epoch


def test_a_take_over_from_a_host_without_workers_has_an_empty_verdict() -> None:
    new = told(on_nodes(running()), Takeover(40, lost="d"))
    assert (new.members, new.verdict, new.reason) == ((0, 1, 2), (), "another coordinator has taken over")


def test_a_take_over_forgets_answers_looks_and_ends_of_the_last_step() -> None:
    state = told(in_phase(Phase.FAILING_OVER), holds(6, 0, 2, "nothing", (1,)), suspects(7, 0, 2, 1))
    new = told(state, Takeover(40))
    assert (new.inventories, new.copies, new.look, new.repeats) == ({}, {}, (), {})
    done = told(in_phase(Phase.DRAINING), is_done(30, 0, 1))
    assert told(done, Takeover(40)).done == ()


def test_a_take_over_keeps_a_slot_whose_owner_is_unknown() -> None:
    """The heir of the slot is a worker that was healed in the open step, which only its inventory tells."""
    state = told(running(), ExitSeen(5, 2, -9), ExitSeen(6, 1, -9))
    assert (state.phase, state.owners) == (Phase.FAILING_OVER, (0, 0, 1))
    new = told(state, Takeover(40))
    assert (new.phase, new.owners) == (Phase.FAILING_OVER, (0, 0, 1))
    assert told(new, holds(41, 0, new.epoch, "all", (0, 1, 2))).owners == (0, 0, 0)


def test_a_take_over_before_the_first_epoch_loses_nothing() -> None:
    state = told(forming(), *JOINED[:2])
    assert step(state, Takeover(40)) == state
    assert told(state, Takeover(40), *JOINED).phase is Phase.RUNNING


def test_a_take_over_at_a_boundary_keeps_the_hand_over() -> None:
    state = in_phase(Phase.RECONFIGURING)
    new = told(state, Takeover(40))
    assert (new.owners, new.leaving, new.committed) == (state.owners, (2,), 0)
    assert 2 not in committed(recovered(new), ((1,), (0,), (0,))).members
