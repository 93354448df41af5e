"""Passes from compute lists to a whole program, against drawings; and programs as CSV."""

from __future__ import annotations

import pytest

from engine.core.errors import ScheduleError
from engine.core.ownership import Grid, Ownership, one_slot_each
from engine.core.program import (
    build_program,
    build_validation,
    from_csv,
    on_owners,
    to_csv,
    with_commit,
    with_transfers,
)
from engine.core.schedule import SCHEDULES, one_f_one_b
from tests.core.drawing import drawn_program, plain, program_of


def test_program_of_two_stages() -> None:
    program = build_program("1f1b", one_slot_each(Grid(2, 2)))
    assert drawn_program(program) == plain(
        """
        0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0COMMIT 0STEP
        1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1COMMIT 1STEP
        """
    )


def test_stage_in_the_middle_receives_and_sends_both_ways() -> None:
    program = build_program("gpipe", one_slot_each(Grid(3, 1)))
    assert drawn_program(program) == plain(
        """
        0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0COMMIT 0STEP
        1: 1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1REDUCE_GRAD 1COMMIT 1STEP
        2: 2RECV_F0 2F0 2B0 2SEND_B0 2REDUCE_GRAD 2COMMIT 2STEP
        """
    )


def test_pipelines_run_the_same_lists_wherever_their_slots_are_owned() -> None:
    program = build_program("1f1b", Ownership(Grid(2, 1, pipelines=2), (3, 0, 2, 1)))
    assert drawn_program(program) == plain(
        """
        0: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1COMMIT 1STEP
        1: 1RECV_F0@1 1F0@1 1B0@1 1SEND_B0@1 1REDUCE_GRAD@1 1COMMIT@1 1STEP@1
        2: 0F0@1 0SEND_F0@1 0RECV_B0@1 0B0@1 0REDUCE_GRAD@1 0COMMIT@1 0STEP@1
        3: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0COMMIT 0STEP
        """
    )


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
    ownership = one_slot_each(Grid(2, 1))
    program = build_program("1f1b", ownership)
    rest = {worker: tuple(action for action in actions if action.microbatch < 0) for worker, actions in program.items()}
    assert with_transfers(rest, ownership) == rest


def test_owner_of_two_slots_reduces_both_then_commits_both_then_steps_both() -> None:
    ownership = Ownership(Grid(2, 1, pipelines=2), (0, 1, 2, 1))
    program = with_commit(dict.fromkeys(ownership.workers(), ()), ownership)
    assert drawn_program(program) == plain(
        """
        0: 0REDUCE_GRAD 0COMMIT 0STEP
        1: 1REDUCE_GRAD 1REDUCE_GRAD@1 1COMMIT 1COMMIT@1 1STEP 1STEP@1
        2: 0REDUCE_GRAD@1 0COMMIT@1 0STEP@1
        """
    )


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


def test_a_schedule_gives_one_slot_to_each_worker() -> None:
    with pytest.raises(AssertionError, match="worker 7 owns two slots"):
        on_owners(one_f_one_b(2, 1), Ownership(Grid(2, 1), (7, 7)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(4, 8), Grid(3, 2, pipelines=3)])
def test_csv_round_trip(schedule: str, grid: Grid) -> None:
    program = build_program(schedule, one_slot_each(grid))
    assert from_csv(to_csv(program)) == program


def test_csv_is_one_worker_a_row_one_action_a_cell() -> None:
    program = on_owners(one_f_one_b(2, 2), one_slot_each(Grid(2, 2)))
    assert to_csv(program) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_a_worker_that_rests_is_an_empty_row() -> None:
    program = build_validation(one_slot_each(Grid(1, 1, pipelines=3)))
    assert to_csv(program) == "0F0\n\n\n"
    assert from_csv(to_csv(program)) == program


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
