"""The trajectory's hash and the comparison of two."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.core.checks.trajectory import DATA, PurityBook, TrajectoryRow, first_difference, trajectory_hash
from engine.core.errors import InvariantError, UserError

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
    ("place", "changed"),
    [
        ("step 1, layer 2: different weights or optimizer state", replace(ROWS[6], state="ff" * 32)),
        ("step 1, layer 2: different buffers", replace(ROWS[6], buffers="ff" * 32)),
        ("step 1: different loss", replace(ROWS[6], loss=math.nextafter(0.75, 1))),
        ("step 1: different loss", replace(ROWS[6], loss=None)),
    ],
)
def test_one_changed_column_is_found_and_changes_the_hash(place: str, changed: TrajectoryRow) -> None:
    rows = [*ROWS[:6], changed, *ROWS[7:]]
    assert str(first_difference(ROWS, rows)).startswith(f"{place}, ")
    assert trajectory_hash(rows) != trajectory_hash(ROWS)


def test_the_first_difference_is_the_one_in_the_earliest_step() -> None:
    changed = [replace(row, state="x") if row.step >= 1 else row for row in ROWS]
    found = first_difference(reversed(ROWS), reversed(changed))
    assert found is not None
    assert (found.step, found.layer, found.run, found.twin) == (1, 0, "10" * 6, "x")


def test_a_tensor_of_the_same_step_is_named_rather_than_the_loss() -> None:
    """The loss stands in every row of a step, also in rows of layers that have no weights."""
    changed = [replace(row, loss=9.0) if row.step == 1 else row for row in ROWS]
    changed[6] = replace(changed[6], state="x")
    found = first_difference(changed, ROWS)
    assert found is not None
    assert (found.step, found.layer) == (1, 2)
    later = [replace(row, loss=9.0) if row.step == 1 else row for row in ROWS]
    later[8] = replace(later[8], state="x")
    assert str(first_difference(later, ROWS)) == "step 1: different loss, 9.0 in this run and 0.75 in its twin"


def test_a_missing_row_is_a_difference_on_either_side() -> None:
    text = "different rows,"
    assert str(first_difference(ROWS[:-1], ROWS)).startswith(f"step 2, layer 3: {text} none in this run and one in")
    assert str(first_difference(ROWS, ROWS[1:])).startswith(f"step 0, layer 0: {text} one in this run and none in")


def test_losses_are_compared_by_their_bits() -> None:
    nan, zero = [TrajectoryRow(0, 0, "a", "b", math.nan)], [TrajectoryRow(0, 0, "a", "b", 0.0)]
    assert first_difference(nan, [TrajectoryRow(0, 0, "a", "b", float("nan"))]) is None
    assert str(first_difference(zero, [TrajectoryRow(0, 0, "a", "b", -0.0)])) == (
        "step 0: different loss, 0.0 in this run and -0.0 in its twin"
    )


def test_two_rows_for_one_layer_and_step_are_a_bug() -> None:
    with pytest.raises(InvariantError, match="two rows for step 0, layer 0"):
        trajectory_hash([ROWS[0], ROWS[0]])


# What processes say of layers: compared by mark, and whose fault a difference is.


def marks(given: str = "i", output: str = "o") -> dict[str, str]:
    return {"input": given, "output": output, "weight gradient": "g"}


def test_what_all_say_alike_is_pure() -> None:
    book = PurityBook()
    book.add(0, [("a", marks()), ("b", marks("o"))])
    book.add(1, [("b", marks("o")), ("c", marks())])
    book.add(2, [("a", marks())])


def test_all_that_differ_are_named_with_both_workers() -> None:
    book = PurityBook("mine:rows")
    book.add(0, [("a", marks()), ("b", marks()), (DATA, {"microbatch 0": "x" * 8 + "t" * 8})])
    with pytest.raises(UserError) as caught:
        book.add(3, [("a", marks(output="p")), ("b", marks(output="p")), (DATA, {"microbatch 0": "y" * 8 + "t" * 8})])
    assert [(problem.field, problem.found) for problem in caught.value.problems] == [
        ("model", "a: its output differs between worker 0 and worker 3"),
        ("model", "b: its output differs between worker 0 and worker 3"),
        ("data", "mine:rows: the inputs of microbatch 0 differ between worker 0 and worker 3"),
    ]


def test_a_layer_that_was_called_with_something_else_is_not_to_blame() -> None:
    book = PurityBook()
    book.add(0, [("a", marks()), ("b", marks("o", "b"))])
    with pytest.raises(UserError) as caught:
        book.add(1, [("a", marks(output="p")), ("b", marks("p", "c"))])
    assert len(caught.value.problems) == 1
