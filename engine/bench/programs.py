"""The benchmark of pure code: to make and verify a large program, and to plan a large recovery, against their limits.

As in `bamboo schedule check`, nothing is collected meanwhile: a program is a million tuples, none of them garbage.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from engine.bench.figures.rows import Row
from engine.core.ownership import Grid, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.verify import verify
from engine.core.recovery.inventory import Inventory
from engine.core.recovery.planner import PlanInput, make_plan

_PROGRAM_LIMIT_S = 2.0
_PLAN_LIMIT_S = 1.0


def bench_programs(num_times: int) -> list[Row]:
    """Measures both, in seconds of the processor."""
    return [
        _row(
            "interleaved P=64 V=4 M=512",
            "make and verify s; peer: limit",
            _make_and_verify,
            num_times,
            _PROGRAM_LIMIT_S,
        ),
        _row("64 workers, M=128, one dead", "plan s; peer: limit", _plan, num_times, _PLAN_LIMIT_S),
    ]


def _row(case: str, metric: str, measured: Callable[[], None], num_times: int, limit_s: float) -> Row:
    taken_s = median(_seconds(measured) for _ in range(num_times))
    return Row(case, metric, taken_s, limit_s, taken_s / limit_s, limit_s, taken_s <= limit_s, num_times)


def _seconds(measured: Callable[[], None]) -> float:
    gc.collect()
    gc.disable()
    try:
        start_s = time.process_time()
        measured()
        return time.process_time() - start_s
    finally:
        gc.enable()


def _make_and_verify() -> None:
    ownership = fresh(Grid(stages=256, microbatches=512), 4)
    assert not verify(build_program("interleaved", ownership), ownership)


def _plan() -> None:
    """Plans a whole step, which is the most that can be left of one, without the worker of a stage in the middle."""
    grid = Grid(stages=64, microbatches=128)
    before = fresh(grid, 1)
    before = with_shadows(before, "lazy", 1, before.workers())
    dead = grid.stages // 2
    (heir,) = before.shadows_of(0, dead)
    ownership = replace(
        before,
        owners=tuple(heir if worker == dead else worker for worker in before.owners),
        shadows=tuple(tuple(each for each in shadows if each not in (dead, heir)) for shadows in before.shadows),
    )
    inventories = tuple(
        Inventory(worker, 1, (*before.slots_of(worker), *before.shadowed_by(worker)), {}, {}, (), ())
        for worker in before.workers()
        if worker != dead
    )
    assert not make_plan(PlanInput(2, 0, ownership, inventories)).lost_stages
