"""The benchmark of scale: its survivors hold what a step leaves behind, and growth is the slope of logarithms."""

from __future__ import annotations

import pytest

from engine.bench.scale import _growth_rows, half_way
from engine.core.ownership import Grid
from engine.core.program.planner import held_at_start, make_plan
from engine.core.program.verify import verify


@pytest.mark.parametrize(("workers", "microbatches"), [(3, 2), (6, 8), (16, 40)])
def test_the_survivors_of_a_step_that_is_half_done(workers: int, microbatches: int) -> None:
    base, source = half_way(Grid(workers, microbatches))
    plans = make_plan(source, base), make_plan(source)
    assert [plan.repair is not None for plan in plans] == [True, False]
    for plan in plans:
        assert verify(plan.program, source.ownership, held=held_at_start(source)) == ()
    assert 0 < sum(sum(held.added.values()) for held in source.inventories) < workers * microbatches


def test_growth_is_the_exponent() -> None:
    figures = [[3.0 * size**2, 5.0 * size**2] for size in (4, 8, 32)]
    rows = _growth_rows("case", "plan", (4, 8, 32), figures, 1.1)
    assert [round(row.ours, 9) for row in rows] == [2.0, 2.0, 2.0]
    assert [row.met for row in rows] == [False, None, None]
    assert _growth_rows("case", "plan", (4,), figures[:1], 1.1) == []
