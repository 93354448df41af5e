"""The trajectory's hash and the comparison of two."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.core.checks.trajectory import TrajectoryRow, first_difference, trajectory_hash

ROWS = [
    TrajectoryRow(step, layer, f"{step}{layer}" * 32, "0" * 64, 1.5 / (step + 1))
    for step in range(3)
    for layer in range(4)
]


def test_hash_says_nothing_about_the_order_of_rows() -> None:
    assert trajectory_hash(reversed(ROWS)) == trajectory_hash(ROWS)
    assert first_difference(reversed(ROWS), ROWS) is None


def test_hash_is_of_these_lines() -> None:
    # The SHA-256 of "0,1,ab,cd,0.1\n10,0,ef,cd,\n", so that old run folders stay comparable.
    rows = [TrajectoryRow(10, 0, "ef", "cd", None), TrajectoryRow(0, 1, "ab", "cd", 0.1)]
    assert trajectory_hash(rows) == "91ca2651cb35c6a93839e85771955c449689560a5632ec445161dbd977832373"


@pytest.mark.parametrize(
    ("column", "changed"),
    [
        ("state", replace(ROWS[6], state="ff" * 32)),
        ("buffers", replace(ROWS[6], buffers="ff" * 32)),
        ("loss", replace(ROWS[6], loss=math.nextafter(0.75, 1))),
        ("loss", replace(ROWS[6], loss=None)),
    ],
)
def test_one_changed_column_is_found_and_changes_the_hash(column: str, changed: TrajectoryRow) -> None:
    rows = [*ROWS[:6], changed, *ROWS[7:]]
    difference = first_difference(ROWS, rows)
    assert difference is not None
    assert difference.startswith(f"step 1, layer 2: {column} differs, ")
    assert trajectory_hash(rows) != trajectory_hash(ROWS)


def test_the_first_difference_is_the_one_in_the_earliest_step() -> None:
    changed = [replace(row, state="x") if row.step >= 1 else row for row in ROWS]
    difference = first_difference(reversed(ROWS), reversed(changed))
    assert difference == f"step 1, layer 0: state differs, {'10' * 32} in the first and x in the second"


def test_a_missing_row_is_a_difference_on_either_side() -> None:
    assert first_difference(ROWS[:-1], ROWS) == "step 2, layer 3: only the second trajectory has this row"
    assert first_difference(ROWS, ROWS[1:]) == "step 0, layer 0: only the first trajectory has this row"


def test_losses_are_compared_by_their_bits() -> None:
    nan, zero = [TrajectoryRow(0, 0, "a", "b", math.nan)], [TrajectoryRow(0, 0, "a", "b", 0.0)]
    assert first_difference(nan, [TrajectoryRow(0, 0, "a", "b", float("nan"))]) is None
    assert first_difference(zero, [TrajectoryRow(0, 0, "a", "b", -0.0)]) == (
        "step 0, layer 0: loss differs, 0.0 in the first and -0.0 in the second"
    )


def test_two_rows_for_one_layer_and_step_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="two rows for step 0, layer 0"):
        trajectory_hash([ROWS[0], ROWS[0]])
