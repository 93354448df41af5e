"""Passes from compute lists to a whole program, against drawings; and programs as CSV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.action import Op, parse_action
from engine.core.errors import InvariantError, ScheduleError
from engine.core.ownership import Grid, Ownership, Redundancy, fresh, with_shadows
from engine.core.program.build import build_program, build_validation, from_csv, to_csv
from engine.core.program.owners import on_owners
from engine.core.program.passes import with_transfers
from engine.core.program.schedules import SCHEDULES
from engine.core.program.verify import verify
from tests.core.drawing import drawn_program, plain, program_of
from tests.core.machine import Machine, drawn_by
from tests.core.random_programs import random_healing, random_ownership
from tests.looped import looped


def test_program_of_two_stages() -> None:
    program = build_program("1f1b", fresh(Grid(2, 2)))
    assert drawn_program(program) == plain(
        """
        0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
        1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1LOG 1COMMIT 1STEP
        """
    )


def test_stage_in_the_middle_receives_and_sends_both_ways() -> None:
    program = build_program("gpipe", fresh(Grid(3, 1)))
    assert drawn_program(program) == plain(
        """
        0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
        1: 1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1REDUCE_GRAD 1LOG 1COMMIT 1STEP
        2: 2RECV_F0 2F0 2B0 2SEND_B0 2REDUCE_GRAD 2LOG 2COMMIT 2STEP
        """
    )


def test_pipelines_run_the_same_lists_wherever_their_slots_are_owned() -> None:
    program = build_program("1f1b", Ownership(Grid(2, 1, pipelines=2), (3, 0, 2, 1)))
    assert drawn_program(program) == plain(
        """
        0: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1LOG 1COMMIT 1STEP
        1: 1RECV_F0@1 1F0@1 1B0@1 1SEND_B0@1 1REDUCE_GRAD@1 1LOG@1 1COMMIT@1 1STEP@1
        2: 0F0@1 0SEND_F0@1 0RECV_B0@1 0B0@1 0REDUCE_GRAD@1 0LOG@1 0COMMIT@1 0STEP@1
        3: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
        """
    )


def test_shadows_log_commit_and_step_after_the_owner_has() -> None:
    program = build_program("1f1b", Ownership(Grid(2, 1), (0, 1), ((1,), (0, 2))))
    assert drawn_program(program) == plain(
        """
        0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0LOG 1LOG 0COMMIT 1COMMIT 0STEP 1STEP
        1: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1LOG 0LOG 1COMMIT 0COMMIT 1STEP 0STEP
        2: 1LOG 1COMMIT 1STEP
        """
    )


def test_state_leaves_before_the_first_receive_and_is_taken_behind_the_last_send() -> None:
    ownership = Ownership(Grid(2, 2), (0, 1), ((1,), (0, 2)))
    program = build_program("1f1b", ownership, healing={(0, (0, 1)), (2, (0, 1))})
    assert drawn_program(program) == plain(
        """
        0: 0F0 0SEND_F0 0F1 0SEND_F1 1HEAL 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0LOG 1LOG 0COMMIT 1COMMIT 0STEP 1STEP
        1: 1HEAL 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1LOG 0LOG 1COMMIT 0COMMIT 1STEP 0STEP
        2: 1HEAL 1LOG 1COMMIT 1STEP
        """
    )
    program = build_program("1f1b", Ownership(Grid(2, 1), (0, 1), ((1,), (0,))), healing={(1, (0, 0))})
    assert [str(action) for action in program[0][:4]] == ["0F0", "0SEND_F0", "0HEAL", "0RECV_B0"]


def test_eager_shadows_run_forwards_of_which_they_have_the_input() -> None:
    ownership = Ownership(Grid(3, 2), (0, 1, 2), ((2,), (0,), (1,)))
    lazy, eager = build_program("1f1b", ownership), build_program("1f1b", ownership, "eager")
    for worker, shadowed in ((0, "1F0 1F1"), (1, "2F0 2F1"), (2, "0F0 0F1")):
        added = [action for action in eager[worker] if action not in lazy[worker]]
        assert " ".join(map(str, added)) == shadowed
        assert tuple(action for action in eager[worker] if action in lazy[worker]) == lazy[worker]
    healing = build_program("1f1b", ownership, "eager", healing={(0, (0, 1))})
    assert not {parse_action("1F0"), parse_action("1F1")} & {*healing[0]}


def test_worker_of_several_slots_runs_them_in_a_good_order() -> None:
    program = build_program("1f1b", Ownership(Grid(3, 1), (0, 0, 1)))
    assert drawn_program(program) == plain(
        """
        0: 0F0 1F0 1SEND_F0 1RECV_B0 1B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD 0LOG 1LOG 0COMMIT 1COMMIT 0STEP 1STEP
        1: 2RECV_F0 2F0 2B0 2SEND_B0 2REDUCE_GRAD 2LOG 2COMMIT 2STEP
        """
    )


def test_a_stage_owned_in_two_pipelines_is_reduced_once() -> None:
    ownership = Ownership(Grid(2, 1, pipelines=2), (0, 1, 2, 1))
    program = build_program("1f1b", ownership)
    ends = {worker: tuple(each for each in actions if each.microbatch < 0) for worker, actions in program.items()}
    assert drawn_program(ends) == plain(
        """
        0: 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
        1: 1REDUCE_GRAD 1LOG 1LOG@1 1COMMIT 1COMMIT@1 1STEP 1STEP@1
        2: 0REDUCE_GRAD@1 0LOG@1 0COMMIT@1 0STEP@1
        """
    )


@given(st.integers(0, 2**32), st.sampled_from(sorted(SCHEDULES)), st.sampled_from(("lazy", "eager")))
def test_programs_of_any_ownership_execute_and_are_verified(seed: int, schedule: str, redundancy: Redundancy) -> None:
    order = drawn_by(seed)
    ownership = random_ownership(order)
    healing = random_healing(ownership, order)
    program = build_program(schedule, ownership, redundancy, healing)
    assert Machine(ownership, healing=healing).run(program, order)
    assert verify(program, ownership, healing) == ()
    for worker, actions in program.items():
        votes = [each for each in actions if each.op is Op.COMMIT]
        assert sorted((each.pipeline, each.stage) for each in votes) == sorted(ownership.held_by(worker))
        behind = actions[actions.index(votes[0]) :] if votes else ()
        assert {each.op for each in behind} <= {Op.COMMIT, Op.STEP}  # the last vote can wait for no other worker


def test_neighbours_on_one_worker_need_no_transfer() -> None:
    ownership = Ownership(Grid(3, 1), (0, 0, 1))
    compute = program_of("0: 0F0 1F0 1B0 0B0\n1: 2F0 2B0")
    assert drawn_program(with_transfers(compute, ownership)) == plain(
        """
        0: 0F0 1F0 1SEND_F0 1RECV_B0 1B0 0B0
        1: 2RECV_F0 2F0 2B0 2SEND_B0
        """
    )


def test_transfers_are_added_to_compute_only() -> None:
    ownership = fresh(Grid(2, 1))
    program = build_program("1f1b", ownership)
    rest = {worker: tuple(action for action in actions if action.microbatch < 0) for worker, actions in program.items()}
    assert with_transfers(rest, ownership) == rest


def test_validation_runs_forwards_of_pipeline_0_alone() -> None:
    program = build_validation(Ownership(Grid(2, 2, pipelines=2), (1, 3, 0, 2)))
    assert drawn_program(program) == plain(
        """
        0:
        1: 0F0 0SEND_F0 0F1 0SEND_F1
        2:
        3: 1RECV_F0 1F0 1RECV_F1 1F1
        """
    )


def test_validation_goes_in_waves_where_a_worker_owns_several_slots() -> None:
    program = build_validation(Ownership(Grid(3, 3, pipelines=2), (4, 1, 4, 1, 2, 2)))
    assert drawn_program(program) == plain(
        """
        1: 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2
        2:
        4: 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 2RECV_F0 2F0 2RECV_F1 2F1 2RECV_F2 2F2
        """
    )


@given(st.integers(0, 2**32))
def test_validation_of_any_ownership_executes(seed: int) -> None:
    order = drawn_by(seed)
    ownership = random_ownership(order)
    program = build_validation(ownership)
    machine = Machine(ownership)
    assert machine.run(program, order)
    grid = ownership.grid
    forwards = sorted((span.worker, *span.action) for span in machine.spans if span.action.op is Op.F)
    assert forwards == sorted(
        (ownership.owner(0, stage), stage, Op.F, each, 0)
        for stage in range(grid.stages)
        for each in range(grid.microbatches)
    )


def test_a_schedule_gives_one_slot_to_each_worker() -> None:
    with pytest.raises(InvariantError, match="worker 7 owns the stages of two lists"):
        on_owners(SCHEDULES["1f1b"](2, 1), Ownership(Grid(2, 1), (7, 7)))


@looped("schedule", SCHEDULES)
@looped("grid", [Grid(1, 1), Grid(4, 8), Grid(3, 2, pipelines=3)])
def test_csv_round_trip(schedule: str, grid: Grid) -> None:
    ownership = with_shadows(fresh(grid), "eager", 1, range(12))
    workers = range(max(ownership.workers()) + 1)
    program = {worker: build_program(schedule, ownership, "eager").get(worker, ()) for worker in workers}
    assert from_csv(to_csv(program)) == program


def test_csv_is_one_worker_a_row_one_action_a_cell() -> None:
    program = on_owners(SCHEDULES["1f1b"](2, 2), fresh(Grid(2, 2)))
    assert to_csv(program) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_a_worker_that_rests_is_an_empty_row() -> None:
    program = build_validation(fresh(Grid(1, 1, pipelines=3)))
    assert to_csv(program) == "0F0\n\n\n"
    assert from_csv(to_csv(program)) == program


def test_a_worker_that_is_no_more_is_an_empty_row() -> None:
    program = program_of("0: 0f0 0I0\n2: 1f1@1 1HEAL@1 1LOG@1")
    assert to_csv(program) == "0f0,0I0\n\n1f1@1,1HEAL@1,1LOG@1\n"
    assert from_csv(to_csv(program)) == {**program, 1: ()}
    assert to_csv({}) == ""


def test_empty_cells_stand_for_waiting_and_are_skipped() -> None:
    assert from_csv("0F0,,,0B0\n,1F0, ,\n") == program_of("0: 0F0 0B0\n1: 1F0")
    assert from_csv("0F0\r\n1F0\r\n") == program_of("0: 0F0\n1: 1F0")


def test_a_bad_cell_is_refused_with_its_place() -> None:
    with pytest.raises(ScheduleError) as refused:
        from_csv("0F0,0B0\n1F0,,1X0\n")
    assert str(refused.value) == "worker 1, position 2: expected an action such as 2F0 or 1SEND_B3, found '1X0'"


@pytest.mark.parametrize("text", ["0F0\r1F0", "0F0\x00", '"0F0\n1F0', "0F0," + "1" * 200_000])
def test_what_is_no_csv_of_actions_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"^worker 0\b"):
        from_csv(text)
