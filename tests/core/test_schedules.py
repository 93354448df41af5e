"""The compute lists of each schedule, against drawings."""

from __future__ import annotations

import pytest

from engine.core.action import Op, parse_action
from engine.core.errors import ScheduleError
from engine.core.job.job_rules import check_schedule
from engine.core.ownership import Grid, fresh
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run, peak_stash
from engine.core.program.schedule_csv import lists_from_csv, named_pairs, rows_to_csv
from engine.core.program.schedules import SCHEDULES, of_kind, overlap_of, pairs_of, with_pairs_together
from engine.core.program.verify import verify
from tests.core.drawing import drawn, drawn_program, plain, program_of
from tests.looped import looped

SHAPES = [(num_stages, num_microbatches) for num_stages in range(1, 17) for num_microbatches in (*range(1, 34), 63, 64)]


@pytest.mark.parametrize(
    ("shape", "drawing"),
    [
        (
            (4, 8),
            """
            0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7
            1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
            2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
            3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
            """,
        ),
        (
            (4, 2),
            """
            0F0 0F1 0B0 0B1
            1F0 1F1 1B0 1B1
            2F0 2F1 2B0 2B1
            3F0 3B0 3F1 3B1
            """,
        ),
        ((3, 1), "0F0 0B0\n1F0 1B0\n2F0 2B0"),
        ((1, 3), "0F0 0B0 0F1 0B1 0F2 0B2"),
    ],
)
def test_1f1b(shape: tuple[int, int], drawing: str) -> None:
    assert drawn(SCHEDULES["1f1b"](*shape)) == plain(drawing)


@pytest.mark.parametrize(
    ("shape", "drawing"),
    [
        (
            (3, 4),
            """
            0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
            1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
            2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
            """,
        ),
        ((1, 2), "0F0 0F1 0B0 0B1"),
        ((2, 1), "0F0 0B0\n1F0 1B0"),
    ],
)
def test_gpipe(shape: tuple[int, int], drawing: str) -> None:
    assert drawn(SCHEDULES["gpipe"](*shape)) == plain(drawing)


@pytest.mark.parametrize(
    ("shape", "drawing"),
    [
        (
            (4, 8),
            """
            0F0 0F1 0F2 0F3 0F4 0F5 0F6 0B0 0F7 0B1 0B2 0B3 0B4 0B5 0B6 0B7
            1F0 1F1 1F2 1F3 1F4 1B0 1F5 1B1 1F6 1B2 1F7 1B3 1B4 1B5 1B6 1B7
            2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2F5 2B3 2F6 2B4 2F7 2B5 2B6 2B7
            3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
            """,
        ),
        ((2, 2), "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"),
        ((3, 1), "0F0 0B0\n1F0 1B0\n2F0 2B0"),
        ((1, 3), "0F0 0B0 0F1 0B1 0F2 0B2"),
    ],
)
def test_eager_1f1b(shape: tuple[int, int], drawing: str) -> None:
    assert drawn(SCHEDULES["eager-1f1b"](*shape)) == plain(drawing)


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "gpipe"])
def test_each_microbatch_goes_forward_then_back_once_and_in_order(name: str) -> None:
    for num_stages, num_microbatches in SHAPES:
        for stage, actions in enumerate(SCHEDULES[name](num_stages, num_microbatches)):
            for op in (Op.F, Op.B):
                microbatches = [action.microbatch for action in actions if action.op is op]
                assert microbatches == list(range(num_microbatches))
            assert {action.stage for action in actions} == {stage}
            assert len(actions) == 2 * num_microbatches


def test_peak_stash_of_every_stage() -> None:
    for num_stages, num_microbatches in SHAPES:
        early = [peak_stash(actions) for actions in SCHEDULES["1f1b"](num_stages, num_microbatches)]
        assert early == [min(num_stages - stage, num_microbatches) for stage in range(num_stages)]
        eager = [peak_stash(actions) for actions in SCHEDULES["eager-1f1b"](num_stages, num_microbatches)]
        assert eager == [min(2 * (num_stages - stage) - 1, num_microbatches) for stage in range(num_stages)]
        late = [peak_stash(actions) for actions in SCHEDULES["gpipe"](num_stages, num_microbatches)]
        assert late == [num_microbatches] * num_stages


# Overlap pairs: which they are, how they come together, what they cost, and where torch's rows ask for them.


NAME = "dualpipev-overlapped"


@looped(
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
    assert drawn_program(with_pairs_together(program, of_kind("OVERLAP_F_B"))) == plain(
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
    text, joined = rows_to_csv(lists), rows_to_csv(lists, of_kind("OVERLAP_F_B"))
    ownership = fresh(Grid(4, 4), 2, "v")
    assert "(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B" in joined
    assert check_schedule(joined, 4, 2, 4, "auto") == []
    assert build_program(joined, ownership) == build_program(NAME, ownership)
    assert build_program(text, ownership) == build_program("dualpipev", ownership) != build_program(NAME, ownership)


@pytest.mark.parametrize(
    ("rows", "found", "why"),
    [
        (
            "0F0,0F1,(0B0;0F2)OVERLAP_B_F,(0F3;0B1)OVERLAP_F_B,0B2,0B3",
            "worker 0, position 2: (0B0;0F2)OVERLAP_B_F",
            "0F1 and 0B0 are a pair",
        ),
        ("(0F0;0B0)OVERLAP_F_B,0F1,0F2,0F3,0B1,0B2,0B3", "worker 0, position 0: (0F0;0B0)OVERLAP_F_B", "0B0 needs 0F0"),
    ],
    ids=["of another pair", "of one microbatch"],
)
def test_a_pair_that_would_not_run_as_written_is_refused(rows: str, found: str, why: str) -> None:
    """Before, its actions were paired anew without a word, and a handler for it was not called."""
    (problem,) = check_schedule(rows, 1, 1, 4, "auto")
    assert (problem.field, problem.found, problem.hint) == ("schedule", found, why)


@pytest.mark.parametrize(
    "rows",
    [
        "0F0,0F1,(0B0;0F2)OVERLAP_B_F,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2",
        "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,(1B0;1F1)OVERLAP_B_F,1B1,1F2,1B2",
    ],
)
def test_a_named_pair_is_brought_together(rows: str) -> None:
    """Transfers stand around it, and no other pair of its kind takes one of the two."""
    assert check_schedule(rows, 2, 1, 3, "auto") == []
    program = build_program(rows, fresh(Grid(2, 3)))
    (worker, _, first, second) = next(named_pairs(rows))
    places = [place for place, _ in pairs_of(program[worker], {"OVERLAP_B_F"})]
    assert [first, second] in [[*program[worker][place : place + 2]] for place in places]


def test_pairs_of_both_kinds_that_run_as_written_are_kept() -> None:
    both = "0F0,(0B0;0F1)OVERLAP_B_F,0B1"
    assert check_schedule(both, 1, 1, 2, "auto") == []
    assert [kind for _, kind in pairs_of(build_program(both, fresh(Grid(1, 2)))[0])] == ["OVERLAP_B_F"]
    for workers, microbatches in ((2, 5), (3, 9), (4, 20)):
        joined = rows_to_csv(SCHEDULES[NAME](workers, microbatches, 2), of_kind("OVERLAP_F_B"))
        assert check_schedule(joined, 2 * workers, 2, microbatches, "auto") == []


@pytest.mark.parametrize(
    "cell", ["(0B0;0F1)OVERLAP_F_B", "(0F1;0B0;0F2)OVERLAP_F_B", "(0F1)OVERLAP_F_B", "(0F1;0I0)OVERLAP_F_B"]
)
def test_a_pair_that_is_not_what_its_name_says_is_refused(cell: str) -> None:
    with pytest.raises(ScheduleError, match="worker 0, position 1: expected two actions with the ops of OVERLAP_F_B"):
        lists_from_csv(f"0F0,{cell}")
