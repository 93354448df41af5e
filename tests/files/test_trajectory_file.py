"""trajectory.csv is read back bit for bit, and a damaged file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.checks.trajectory import TrajectoryRow, first_difference, trajectory_hash
from engine.core.errors import StorageError
from engine.files.trajectory_file import trajectory_rows, trajectory_text

HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
COUNTS = st.integers(min_value=0, max_value=10**6)
ROWS = st.lists(
    st.builds(TrajectoryRow, COUNTS, COUNTS, HEX, HEX, st.none() | st.floats()), unique_by=lambda r: (r.step, r.layer)
)


@given(rows=ROWS)
def test_round_trip(rows: list[TrajectoryRow]) -> None:
    again = trajectory_rows(trajectory_text(rows), Path("t.csv"))
    assert [(row.step, row.layer) for row in again] == [(row.step, row.layer) for row in rows]
    assert first_difference(again, rows) is None
    assert trajectory_hash(again) == trajectory_hash(rows)


def test_the_file_is_plain_csv() -> None:
    rows = [TrajectoryRow(0, 1, "ab", "cd", 0.1), TrajectoryRow(1, 1, "ef", "cd", None)]
    assert trajectory_text(rows) == "step,layer,state,buffers,loss\n0,1,ab,cd,0.1\n1,1,ef,cd,\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv:1: expected the columns step,layer,state,buffers,loss"),
        ("step,loss\n", "t.csv:1: expected the columns step,layer,state,buffers,loss"),
        ("step,layer,state,buffers,loss\n0,0,a,b,1\n0,1,a\n", "t.csv:3: expected step,layer,.*, found '0,1,a'"),
        ("step,layer,state,buffers,loss\n0,x,a,b,1\n", "t.csv:2: expected step,layer,.*, found '0,x,a,b,1'"),
        ("step,layer,state,buffers,loss\n0,0,a,b,1.0.0\n", "t.csv:2: "),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        trajectory_rows(text, Path("t.csv"))
