"""Shards: every cell in exactly one, about the same time in each, the same wherever they are made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.core.faults.matrix import MAX_JOBS, CiShard, estimated, parse_part, shards, workflow_matrix
from tests.looped import looped

NAMES = [f"cell-{number}" for number in range(20)]


@given(st.integers(0, 60), st.integers(1, 12), st.dictionaries(st.integers(0, 70), st.floats(0.001, 100)))
def test_every_cell_is_in_one_shard(num_cells: int, count: int, times: dict[int, float]) -> None:
    names = [f"cell-{number}" for number in range(num_cells)]
    seconds = {f"cell-{number}": time for number, time in times.items()}
    parts = shards(names, count, seconds)
    assert len(parts) == count
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(part == sorted(part, key=names.index) for part in parts)
    taken = estimated(names, seconds)
    totals = [sum(taken[name] for name in part) for part in parts]
    # The rule of the longest first: no part is longer than the shortest by more than one cell.
    assert max(totals) - min(totals) <= max(taken.values(), default=0.0) + 1e-9


def test_known_times_balance() -> None:
    parts = shards(NAMES[:5], 2, {"cell-3": 4.0, "cell-0": 1.0, "cell-1": 1.0, "cell-2": 1.0, "cell-4": 1.0})
    assert parts == [["cell-3"], ["cell-0", "cell-1", "cell-2", "cell-4"]]


def test_what_is_not_known_takes_as_long_as_the_others() -> None:
    assert estimated(["a", "b", "c"], {"a": 2.0, "b": 4.0, "x": 99.0}) == {"a": 2.0, "b": 4.0, "c": 3.0}
    assert estimated(["a"], {}) == {"a": 1.0}


@pytest.mark.parametrize(("text", "part"), [("1/1", CiShard(1, 1)), ("3/8", CiShard(3, 8)), (" 8/8 ", CiShard(8, 8))])
def test_parts(text: str, part: CiShard) -> None:
    assert parse_part(text) == part


@looped("text", ["", "3", "0/8", "9/8", "1/0", "-1/2", "1/2/3", "a/b", "1.0/2"])
def test_bad_parts(text: str) -> None:
    with pytest.raises(UserError, match="a part such as 3/8"):
        parse_part(text)


def test_a_workflow_matrix_has_one_job_per_shard() -> None:
    assert workflow_matrix("m", NAMES, 2, {}) == {
        "include": [{"matrix": "m", "shard": "1/2", "cells": 10}, {"matrix": "m", "shard": "2/2", "cells": 10}]
    }


@pytest.mark.parametrize(("num_cells", "asked", "count"), [(3, 8, 3), (5000, 4000, MAX_JOBS), (1, 1, 1)])
def test_a_workflow_matrix_has_no_empty_and_not_too_many_jobs(num_cells: int, asked: int, count: int) -> None:
    made = workflow_matrix("m", [f"cell-{number}" for number in range(num_cells)], asked, {})["include"]
    assert len(made) == count
    assert sum(int(each["cells"]) for each in made) == num_cells
    assert all(int(each["cells"]) > 0 for each in made)
