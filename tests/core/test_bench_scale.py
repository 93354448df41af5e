"""The benchmark of scale: its survivors hold what a step leaves behind, and growth is the slope of logarithms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.bench.recovery import BusyTime, busy_ms
from engine.bench.scale import _bench_messages, _growth_rows, half_way
from engine.core.errors import InvariantError
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


def test_busy_time_is_read_between_two_samples() -> None:
    busy = BusyTime()
    busy._samples = [(0, 5.0), (10, 25.0), (20, 25.0)]
    assert [busy.ms(0, 5), busy.ms(5, 15), busy.ms(12, 19)] == [10.0, 10.0, 0.0]
    with pytest.raises(InvariantError, match="the samples begin before a recovery"):
        busy.ms(5, 25)
    assert busy_ms("cpu  10 2 3 900 70 4 1 8 0 0\ncpu0 1 1") == 20 * 1000 / os.sysconf("SC_CLK_TCK")


def test_the_bytes_of_a_death_grow_no_faster_than_the_job() -> None:
    rows = {(row.case, row.metric): row for row in _bench_messages((16, 64), Path())}
    growth = rows["P=16 to 64, M=128", "inventories and plans kB: exponent in P; peer: linear"]
    longest = rows["P=64 M=128", "the longest message kB; peer: limit"]
    assert growth.ours < 1.1 and longest.ours < longest.peer / 10
    assert rows["P=64 M=128", "links; peer: all pairs"].ours == 62
