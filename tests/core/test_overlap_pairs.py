"""Overlap pairs: which they are, how they come together, what they cost, and where torch's rows ask for them."""

from __future__ import annotations

import pytest

from engine.core.action import parse_action
from engine.core.errors import ScheduleError
from engine.core.job.job_rules import check_schedule
from engine.core.ownership import Grid, fresh
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.core.program.schedule_csv import lists_from_csv, rows_to_csv
from engine.core.program.schedules import SCHEDULES, overlap_of, pairs_of, with_pairs_together
from engine.core.program.verify import verify
from tests.core.drawing import drawn_program, plain, program_of

NAME = "dualpipev-overlapped"


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("2F3", "1B2", "OVERLAP_F_B"),
        ("1B2", "2F3", "OVERLAP_B_F"),
        ("2F3", "2B3", None),
        ("2F3", "2B3@1", "OVERLAP_F_B"),
        ("2F3", "1I2", None),
        ("2F3", "1F2", None),
        ("2F3", "1SEND_B2", None),
    ],
)
def test_a_pair_is_a_forward_and_a_backward_of_another_microbatch(first: str, second: str, kind: str | None) -> None:
    assert overlap_of(parse_action(first), parse_action(second)) == kind


def test_no_action_is_in_two_pairs() -> None:
    actions = program_of("0: 0F0 0F1 0B0 0F2 0B1 0RECV_F3 0B2")[0]
    assert list(pairs_of(actions)) == [(1, "OVERLAP_F_B"), (3, "OVERLAP_F_B")]


def test_transfers_go_round_a_pair_and_stay_elsewhere() -> None:
    program = program_of("0: 0RECV_F1 0F1 0SEND_F1 3RECV_B0 3B0 3SEND_B0 0F2 0SEND_F2 3I1 0B2 3RECV_F3 3F3")
    assert drawn_program(with_pairs_together(program)) == plain(
        "0: 0RECV_F1 3RECV_B0 0F1 3B0 0SEND_F1 3SEND_B0 0F2 0SEND_F2 3I1 0B2 3RECV_F3 3F3"
    )


def test_overlapped_a_pair_takes_as_long_as_the_longer_of_the_two() -> None:
    ownership = fresh(Grid(1, 3))
    program = program_of("0: 0F0 0F1 0B0 0F2 0B1 0B2")
    assert dry_run(program, ownership).makespan == 9
    run = dry_run(program, ownership, overlapping=True)
    assert run.makespan == 1 + 2 + 2 + 2
    assert [(span.start, span.end) for span in run.spans] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 7)]


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_the_pairs_of_the_schedule_stand_together_and_run(workers: int) -> None:
    """N pairs are N forwards that take no time of their own."""
    for microbatches in (2 * workers, 2 * workers + 1, 5 * workers):
        ownership = fresh(Grid(2 * workers, microbatches), 2, "v")
        program = build_program(NAME, ownership)
        assert verify(program, ownership) == ()
        crossings = microbatches - 2 * workers
        for worker in range(workers):
            assert len(list(pairs_of(program[worker]))) == 2 * (crossings + worker + 1) + workers - 1 - worker
        one_by_one = dry_run(program, ownership).makespan
        assert dry_run(program, ownership, overlapping=True).makespan <= one_by_one - 2 * crossings


def test_rows_as_torch_writes_them_are_overlapped() -> None:
    lists = SCHEDULES[NAME](2, 4, 2)
    text, joined = rows_to_csv(lists), rows_to_csv(lists, pairs=True)
    ownership = fresh(Grid(4, 4), 2, "v")
    assert "(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B" in joined
    assert check_schedule(joined, 4, 2, 4, "auto") == []
    assert build_program(joined, ownership) == build_program(NAME, ownership)
    assert build_program(text, ownership) == build_program("dualpipev", ownership) != build_program(NAME, ownership)


@pytest.mark.parametrize(
    ("rows", "found", "why"),
    [
        (
            "0F0,0F1,(0B0;0F2)OVERLAP_B_F,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2",
            "worker 0, position 2: (0B0;0F2)OVERLAP_B_F",
            "0F1 and 0B0 are a pair",
        ),
        (
            "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,(1B0;1F1)OVERLAP_B_F,1B1,1F2,1B2",
            "worker 1, position 1: (1B0;1F1)OVERLAP_B_F",
            "a transfer stands between the two",
        ),
    ],
    ids=["of another pair", "apart"],
)
def test_a_pair_that_would_not_run_as_written_is_refused(rows: str, found: str, why: str) -> None:
    """Before, its actions were paired anew without a word, and a handler for it was not called."""
    (problem,) = check_schedule(rows, 2, 1, 3, "auto")
    assert (problem.field, problem.found, problem.hint) == ("schedule", found, why)


def test_pairs_of_both_kinds_that_run_as_written_are_kept() -> None:
    both = "0F0,(0B0;0F1)OVERLAP_B_F,0B1"
    assert check_schedule(both, 1, 1, 2, "auto") == []
    assert [kind for _, kind in pairs_of(build_program(both, fresh(Grid(1, 2)))[0])] == ["OVERLAP_B_F"]
    for workers, microbatches in ((2, 5), (3, 9), (4, 20)):
        joined = rows_to_csv(SCHEDULES[NAME](workers, microbatches, 2), pairs=True)
        assert check_schedule(joined, 2 * workers, 2, microbatches, "auto") == []


@pytest.mark.parametrize(
    "cell", ["(0B0;0F1)OVERLAP_F_B", "(0F1;0B0;0F2)OVERLAP_F_B", "(0F1)OVERLAP_F_B", "(0F1;0I0)OVERLAP_F_B"]
)
def test_a_pair_that_is_not_what_its_name_says_is_refused(cell: str) -> None:
    with pytest.raises(ScheduleError, match="worker 0, position 1: expected two actions with the ops of OVERLAP_F_B"):
        lists_from_csv(f"0F0,{cell}")
