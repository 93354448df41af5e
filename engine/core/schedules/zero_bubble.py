"""Schedules that split the backward: the part for the weights waits for nobody, so it fills what would be a bubble.

ZB1P has one stage per worker and 1F1B's memory; ZBV has two, placed as a V, and no bubble at all when the three parts
(forward, backward for the input, backward for the weights) cost the same and microbatches are at least 2P - 1.
"""

from __future__ import annotations

from engine.core.action import Op
from engine.core.schedules.compute import ComputeLists, Line


def zb1p(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """ZB-H1: 1F1B whose weight gradients on worker w lag w microbatches behind (Qi et al., ICLR 2024, section 2.2)."""
    assert stages_per_worker == 1
    lists = []
    for worker in range(num_workers):
        line = Line()
        line.add(worker, *[Op.F] * min(num_workers - 1 - worker, num_microbatches))
        for microbatch in range(num_microbatches):
            if line.num(worker, Op.F) < num_microbatches:
                line.add(worker, Op.F)
            line.add(worker, Op.I, *[Op.W] * (microbatch >= worker))
        line.add(worker, *[Op.W] * (num_microbatches - line.num(worker, Op.W)))
        lists.append(tuple(line.actions))
    return tuple(lists)


def zbv(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """ZBV: two stages per worker, placed as a V (Qi et al., Pipeline Parallelism with Controllable Memory, 2024).

    With fewer microbatches than fill the pipeline, it is the schedule of as many as do without those too many.
    """
    assert stages_per_worker == 2
    whole = max(2 * num_workers - 1, num_microbatches)
    lines = [_zbv_line(worker, num_workers, whole) for worker in range(num_workers)]
    return tuple(tuple(each for each in line.actions if each.microbatch < num_microbatches) for line in lines)


def _zbv_line(worker: int, num_workers: int, num_microbatches: int) -> Line:
    line, down, up = Line(), worker, 2 * num_workers - 1 - worker
    backward = (Op.I, Op.W)
    line.add(down, *[Op.F] * (2 * (num_workers - worker) - 1))
    for _ in range(worker):
        line.add(up, Op.F)
        line.add(down, Op.F)
    for _ in range(num_workers - worker):
        line.add(up, Op.F, *backward)
    while line.num(up, Op.F) < num_microbatches:
        if line.num(down, Op.F) < num_microbatches:
            line.add(down, Op.F)
        line.add(down, *backward)
        line.add(up, Op.F, *backward)
    for _ in range(worker):
        line.add(down, Op.I)
        line.add(up, Op.I)
    for _ in range(num_workers - worker):
        line.add(down, *backward)
    for stage in (up, down):
        line.add(stage, *[Op.W] * (num_microbatches - line.num(stage, Op.W)))
    return line
