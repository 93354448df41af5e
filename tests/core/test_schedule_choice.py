"""Placements, compute lists as text, and what a schedule asks of a job."""

from __future__ import annotations

import pytest

from engine.core.errors import ScheduleError
from engine.core.job.job_rules import check_schedule
from engine.core.job.schedule_comparison import compare
from engine.core.ownership import Grid, Placement, fresh, worker_of
from engine.core.program.build import build_program, pairs_in
from engine.core.program.passes import overhead_floor
from engine.core.program.schedule_csv import lists_from_csv, placement_of, rows_to_csv
from engine.core.program.schedules import SCHEDULES, op_costs, pairs_of
from tests.core.drawing import drawn, plain
from tests.looped import looped


@pytest.mark.parametrize(
    ("placement", "owners"), [("loop", (0, 1, 2, 0, 1, 2, 0, 1, 2)), ("v", (0, 1, 2, 2, 1, 0, 0, 1, 2))]
)
def test_stages_are_dealt_out_in_rounds(placement: Placement, owners: tuple[int, ...]) -> None:
    assert tuple(worker_of(stage, 3, placement) for stage in range(9)) == owners
    assert fresh(Grid(9, 1), 3, placement).owners == owners


def test_pipelines_have_workers_of_their_own() -> None:
    assert fresh(Grid(4, 1, pipelines=2), 2, "v").owners == (0, 1, 1, 0, 2, 3, 3, 2)


@pytest.mark.parametrize(
    ("name", "v", "drawing"),
    [
        ("zb1p", 1, "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"),
        (
            "interleaved",
            2,
            """
            0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
            1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2
            """,
        ),
        (
            "zbv",
            2,
            """
            0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
            1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
            """,
        ),
    ],
)
def test_small_ones_as_drawn(name: str, v: int, drawing: str) -> None:
    assert drawn(SCHEDULES[name](2, 3, v)) == plain(drawing)


def test_microbatches_are_put_in_order_and_pairs_taken_apart() -> None:
    text = "0F1,0F0,,(1F1;0B1)OVERLAP_F_B,0I0,0W0,0REDUCE_GRAD\n"
    assert drawn(lists_from_csv(text)) == "0F0 0F1 1F1 0B0 0I1 0W1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0SEND_F0\n", "worker 0, position 1: expected F, B, I and W of one pipeline"),
        ("0F0\n1F0,1f0\n", "worker 1, position 1: expected F, B, I and W of one pipeline"),
        ("0F0,,0SEND_F0\n", "worker 0, position 2: expected F, B, I and W of one pipeline"),
        ("0F0,0X1\n", "worker 0, position 1: expected an action such as 2F0"),
        ("(0F0;)OVERLAP_F_B,\n", "worker 0, position 0: expected an action such as 2F0"),
    ],
)
def test_what_is_no_compute_list_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lists_from_csv(text)


def problems_of(schedule: str, stages: int, v: int, m: int = 8, choice: str = "auto") -> list[str]:
    return [str(each) for each in check_schedule(schedule, stages, v, m, choice)]  # type: ignore[arg-type]


@looped(
    ("second", "told"),
    [
        ("1F0,1B0,1F1,1B1,1B1", "worker 1, position 4: 1B1: stands twice"),
        ("1F0,,1B0,1F1,1REDUCE_GRAD,1B1,1B1", "worker 1, position 6: 1B1: stands twice"),
        ("1B1,1F0,1F1,1B1,1B0", "worker 1, position 3: 1B1: stands twice"),
        ("1F0,(1F1;1B0)OVERLAP_F_B,1B1,1F1", "worker 1, position 3: 1F1: stands twice"),
        ("1F0,1B0,1B1,,1F1", "worker 1, position 2: 1B1: stands before 1F1, which it requires"),
        ("1F0,1B0,1F1,1B9", "worker 1, position 3: 1B9: "),
        ("1F0,1B0,1F1", "worker 1: 1B1: is missing"),
    ],
)
def test_a_broken_rule_is_told_at_its_cell(second: str, told: str) -> None:
    found = problems_of(f"0F0,0F1,0B0,0B1\n{second}\n", 2, 1, 2)
    assert any(f"found {told}" in each for each in found), found


def test_a_transfer_has_no_cell() -> None:
    found = problems_of("0F0,0F9,0B0,0B1\n1F0,1F9,1B0,1B9\n", 2, 1, 2)
    assert any("found worker 0, position 1: 0F9: " in each for each in found), found
    assert any("found worker 0: 0SEND_F9: " in each for each in found), found


def test_what_a_schedule_asks_of_a_job() -> None:
    assert problems_of("zbv", 8, 2) == problems_of("interleaved", 8, 4) == problems_of("zbv", 8, 2, choice="v") == []
    assert problems_of("zbv", 8, 1) == [
        "stages_per_worker: expected 2 with schedule zbv, found 1 (8 stages are then on 4 workers)"
    ]
    assert problems_of("interleaved", 8, 3) == [
        "stages_per_worker: expected a divisor of 8 stages: 1, 2, 4, 8, found 3"
    ]
    assert problems_of("interleaved", 8, 2, choice="v") == [
        "placement: expected loop with schedule interleaved, found 'v'"
    ]
    assert problems_of("dualpipev", 8, 2, 7) == [
        "microbatches: expected a whole number >= 8 with schedule dualpipev on 4 workers, found 7"
    ]


def test_lists_of_ones_own_are_verified_and_know_their_placement() -> None:
    text = rows_to_csv(SCHEDULES["zbv"](3, 4, 2))
    assert problems_of(text, 6, 2, 4) == []
    assert placement_of(text, "auto") == "v"
    ownership = fresh(Grid(6, 4), 2, "v")
    assert build_program(text, ownership) == build_program("zbv", ownership)
    assert problems_of(text, 6, 2, 5)[0].endswith("worker 0: 0F4: is missing")
    assert problems_of(text, 8, 2, 4) == [
        "schedule: expected one row per worker of a pipeline: 4, found 3 rows (8 stages, 2 on each worker)"
    ]
    assert problems_of(text, 6, 2, 4, "loop")[0].startswith("schedule: expected the stages on the workers as placement")
    assert "stage 0 is on worker 0 too" in problems_of("0F0,0B0\n0F0,0B0\n", 2, 1, 1)[0]


def test_the_table_compares_on_equal_work() -> None:
    rows = {row.schedule: row for row in compare(8, 8, 2).rows}
    assert rows.keys() == SCHEDULES.keys()
    assert {name: row.over_ideal for name, row in rows.items()} == {
        "1f1b": 66 / 48,
        "eager-1f1b": 66 / 48,
        "gpipe": 66 / 48,
        "interleaved": 57 / 48,
        "interleaved-flexible": 57 / 48,
        "interleaved-paired": 57 / 48,
        "looped-bfs": 57 / 48,
        "zb1p": 51 / 48,
        "zb2p": 54 / 48,
        "v-min": 59 / 48,
        "v-half": 58 / 48,
        "zbv": 51 / 48,
        "dualpipev": 51 / 48,
        "dualpipev-overlapped": 54 / 48,
        "dualpipe": 50 / 48,
    }
    assert (rows["1f1b"].transfers, rows["interleaved"].transfers, rows["zbv"].transfers) == (48, 112, 96)


def test_what_does_not_fit_is_named_with_the_reason() -> None:
    comparison = compare(4, 3, 1)
    least = {"interleaved-paired": "2 to 4096"}
    assert comparison.skipped == {
        name: f"stages_per_worker: expected {least.get(name, 2)} with schedule {name}, found 1 "
        "(4 stages are then on 2 workers)"
        for name, schedule in SCHEDULES.items()
        if not schedule.takes(1)
    } | {"dualpipe": "microbatches: expected a whole number >= 4 with schedule dualpipe on 4 workers, found 1"}
    assert {*SCHEDULES} - {row.schedule for row in comparison.rows} == {*comparison.skipped}
    few = compare(8, 7, 2).skipped
    expected = "microbatches: expected a whole number >= 8 with schedule dualpipev on 4 workers, found 7"
    assert few["dualpipev"] == expected
    assert "zbv" not in few
    odd = compare(4, 9, 1).skipped["dualpipe"]
    assert odd == "microbatches: expected an even number, half in each direction, found 9"


def test_the_table_counts_slices() -> None:
    """Of 1F1B they are N times as many microbatches, each with a part of its costs, transfers and stash."""
    comparison = compare(4, 8, 1, latency=0.5, slices=4)
    rows = {row.schedule: row for row in comparison.rows}
    whole = {row.schedule: row for row in compare(4, 8, 1, latency=0.5).rows}
    assert rows["1f1b"].makespan < whole["1f1b"].makespan
    assert compare(4, 8, 1, slices=4).rows[0].makespan == 3 * (32 + 3) / 4
    assert (rows["1f1b"].peak_stash, whole["1f1b"].peak_stash) == (4 + 3, 4)
    assert rows["1f1b"].transfers == 4 * whole["1f1b"].transfers
    assert comparison.skipped["dualpipe"] == "slices: expected 1 with schedule dualpipe, found 4"


def test_the_table_takes_costs() -> None:
    """A bubble of (P - 1) (F + I - W) for zb1p, of (P - 1) (F + B) for 1f1b."""
    costs = op_costs(forward=2, backward=5, weights=1)
    rows = {row.schedule: row for row in compare(4, 8, 1, lambda action: costs.get(action.op, 0)).rows}
    assert rows["1f1b"].makespan == (8 + 3) * 7
    assert rows["zb1p"].makespan == 8 * 7 + 3 * (2 + 4 - 1)


def test_the_table_shows_what_hides_a_transfer() -> None:
    """1F1B pays for two transfers a hop in each round of P microbatches, eager-1F1B in the fill and the drain."""
    rows = {row.schedule: row for row in compare(4, 8, 1, latency=0.5).rows}
    assert rows["1f1b"].makespan == 33 + 2 * (3 * 8 // 4 + 2) * 0.5
    assert rows["eager-1f1b"].makespan == 33 + 2 * 3 * 0.5
    assert (rows["1f1b"].peak_stash, rows["eager-1f1b"].peak_stash) == (4, 7)
    eager = {row.schedule: row for row in compare(4, 8, 1, redundancy="eager", latency=0.5).rows}
    for name, row in rows.items():
        assert eager[name].over_none == pytest.approx(eager[name].makespan / row.makespan - 1)


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 7), (4, 8), (4, 16), (2, 8)])
def test_the_table_says_what_redundant_forwards_cost(stages: int, microbatches: int) -> None:
    (row,) = [each for each in compare(stages, microbatches, 1, redundancy="eager").rows if each.schedule == "1f1b"]
    assert row.over_none == pytest.approx(overhead_floor(stages, microbatches, 1, 2))
    assert all(each.over_none == 0 for each in compare(stages, microbatches, 1, redundancy="lazy").rows)


def test_a_backward_beside_its_weight_part_is_the_input_part() -> None:
    """As older versions of torch wrote it."""
    lists = SCHEDULES["zb1p"](4, 8, 1)
    assert lists_from_csv(rows_to_csv(lists).replace("I", "B")) == lists


def test_a_handler_makes_pairs_as_long_as_their_longer_half() -> None:
    apart, at_once = (
        {row.schedule: row for row in compare(8, 16, 2, overlapping=overlapping).rows} for overlapping in (False, True)
    )
    assert at_once["dualpipev-overlapped"].makespan < 0.8 * apart["dualpipev-overlapped"].makespan
    assert at_once["interleaved-paired"].makespan < 0.8 * apart["interleaved-paired"].makespan
    assert all(at_once[name] == row for name, row in apart.items() if not SCHEDULES[name].overlaps)


def test_pairs_of_either_kind_are_kept_as_a_file_has_them() -> None:
    """With a backward first, as the file says, though a forward before it could take it instead."""
    ownership = fresh(Grid(8, 8), 2)
    program = build_program("interleaved-paired", ownership)
    named = {worker: [*pairs_of(actions, {"OVERLAP_B_F"})] for worker, actions in program.items()}
    assert {worker: len(pairs) for worker, pairs in named.items()} == {0: 5, 1: 7, 2: 9, 3: 11}
    text = rows_to_csv(SCHEDULES["interleaved"](4, 8, 2), pairs_in("interleaved-paired"))
    assert check_schedule(text, 8, 2, 8, "auto") == []
    assert build_program(text, ownership) == program
    assert lists_from_csv(text) == SCHEDULES["interleaved"](4, 8, 2)
