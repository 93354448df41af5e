"""Another schedule in a run that goes on: from a step boundary on, never inside a step; refused if it cannot fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.codec.documents import state_of, state_text
from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.ownership import Grid, Ownership, fresh
from engine.core.program.inventory import PlanMessage, to_json
from engine.core.program.owners import owners_program
from engine.core.protocol.events import ExitSeen, JobRestart, Takeover, WantedSchedule
from engine.core.protocol.membership import plan_document, step
from engine.core.protocol.orders import held_at_boundary, prepare_epoch
from engine.core.protocol.plan_orders import with_repair
from engine.core.protocol.schedule_change import change_of, placed_owners
from engine.core.protocol.state import Phase, State
from engine.core.protocol.worker_inputs import plan_epoch
from tests.core.membership_cases import committed, recovered, restarting, running, told

GRID = Grid(3, 4)
ZB = WantedSchedule(5, "zb1p", "a test")


def test_a_schedule_counts_from_the_next_boundary_on_and_until_the_next_change() -> None:
    asked = told(running(), ZB)
    assert (asked.phase, asked.epoch, asked.schedule) == (Phase.RUNNING, 1, "")
    new = committed(asked)
    assert (new.phase, new.epoch, new.schedule) == (Phase.RECONFIGURING, 2, "zb1p")
    assert (new.reason, new.planned) == ("schedule zb1p from step 1 on (a test)", True)
    assert plan_document(new).schedule == "zb1p"
    later = committed(recovered(new))
    assert (later.phase, later.epoch, later.schedule) == (Phase.RUNNING, 2, "zb1p"), "no epoch more"
    back = committed(told(later, WantedSchedule(30, "", "a test")))
    assert (back.epoch, back.schedule) == (3, "")
    assert back.reason == "the schedule of the job from step 3 on (a test)"


def test_a_wish_that_is_taken_back_before_the_boundary_makes_no_epoch() -> None:
    state = committed(told(running(), ZB, WantedSchedule(6, "", "a test")))
    assert (state.phase, state.epoch) == (Phase.RUNNING, 1)


@pytest.mark.parametrize("before", [True, False], ids=["before the boundary", "behind it"])
def test_a_death_is_repaired_by_the_schedule_that_the_open_step_began_with(before: bool) -> None:
    state = told(running(), ZB) if before else recovered(committed(told(running(), ZB)))
    dead = told(state, ExitSeen(25, 2, -9))
    assert (dead.phase, plan_document(dead).schedule) == (Phase.FAILING_OVER, "" if before else "zb1p")
    new = committed(recovered(dead, 26), now_ns=30)
    assert (new.schedule, new.phase) == ("zb1p", Phase.RECONFIGURING if before else Phase.RUNNING)


def test_the_next_coordinator_keeps_both_schedules_and_workers_that_begin_again_none() -> None:
    state = told(recovered(committed(told(running(), ZB))), WantedSchedule(30, "gpipe", "a test"))
    taken = step(state_of(state_text(state), 40), Takeover(41))
    assert (taken.schedule, taken.wanted_schedule) == ("zb1p", "gpipe")
    again = step(told(restarting()._replace(schedule="zb1p", wanted_schedule="zb1p")), JobRestart(50))
    assert (again.schedule, again.wanted_schedule) == ("", "")


def test_the_epoch_is_foreseen_with_its_schedule() -> None:
    state = told(running(), ZB)
    prepared = prepare_epoch(state, Ownership(GRID, state.owners, state.shadows), 7)
    assert prepared is not None
    new = told(step(state, prepared.events[0]), *prepared.events[1:])
    assert plan_document(new) == prepared.document


def document(state: State, owners: tuple[int, ...], schedule: str) -> PlanMessage:
    """Returns the document of a boundary at which all workers are whole."""
    ownership = Ownership(GRID, owners)
    held = [(worker, to_json(held_at_boundary(worker, 1, ownership))) for worker in owners]
    return PlanMessage(2, 0, owners, (), owners, ((),) * 3, tuple(held), before=owners, schedule=schedule)


def test_a_plan_without_a_failure_is_the_step_of_the_schedule_in_use() -> None:
    """So the repair of the next death finds the program that is running."""
    job, owners = Job(stages=3, microbatches=4), (0, 1, 2)
    for schedule in ("", "zb1p", "gpipe"):
        told_to = with_repair(job, document(running(), owners, schedule))
        if schedule == "gpipe":
            assert told_to.repair is None, "merged in that order, two stages would take longer"
            continue
        made = plan_epoch(GRID, job.schedule, told_to).plan
        whole = owners_program(schedule or "1f1b", GRID, owners)
        assert all(made.program[worker][: len(whole[worker])] == whole[worker] for worker in owners)


V = Job(stages=4, stages_per_worker=2, schedule="interleaved", microbatches=4)
PLACES = {"loop": fresh(V.grid, 2).owners, "v": fresh(V.grid, 2, "v").owners}


def test_another_placement_moves_slots_and_a_merged_one_moves_nothing() -> None:
    assert placed_owners(V, "zbv", PLACES["loop"]) == PLACES["v"]
    assert placed_owners(V, "zbv", PLACES["v"]) == PLACES["v"]
    assert placed_owners(V, "", PLACES["v"]) == PLACES["loop"], "back to that of the job"
    assert placed_owners(V, "zbv", (5, 1, 5, 1)) == (5, 1, 1, 5), "another worker has replaced the first one"
    assert placed_owners(V, "zbv", (1, 1, 1, 1)) == ()
    assert placed_owners(replace(V, stages_per_worker=1, stages=3), "zb1p", (0, 1, 2)) == ()


@pytest.mark.parametrize(
    ("job", "name", "words"),
    [
        (Job(stages=3), "zbv", "stages_per_worker: expected 2 with schedule zbv"),
        (V, "1f1b", "own, interleaved"),
        (replace(V, microbatches=2, schedule="zbv"), "dualpipev", "microbatches: expected a whole number >= 4"),
        (Job(stages=3), "zb1", "did you mean 'zb1p'"),
        (Job(stages=3), "own", "another one than that of the run"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_with_those_that_do(job: Job, name: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        change_of(job, running(), name)
    assert words in str(caught.value), str(caught.value)
