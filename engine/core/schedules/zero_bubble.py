"""Zero-bubble schedules: they split the backward, and the part for the weights, which has no successor, fills bubbles.

ZB1P has one stage per worker and the memory of 1F1B. ZBV has two stages per worker, placed as a V. It has no bubble if
forward, backward for the input and backward for the weights cost the same and M >= 2P - 1. ZB1P with P = 3, M = 4:

    worker 0  0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    worker 1      1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    worker 2          2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
"""

from __future__ import annotations

from engine.core.action import Op
from engine.core.errors import ensure
from engine.core.schedules.compute import ComputeLists, WorkerList


def zb1p(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Returns ZB-H1: 1F1B in which W of worker w lags w microbatches behind I (Qi et al., ICLR 2024, section 2.2)."""
    ensure(stages_per_worker == 1, f"one stage per worker, not {stages_per_worker}")
    lists = []
    for worker in range(num_workers):
        line = WorkerList()
        line.add(worker, *[Op.F] * min(num_workers - 1 - worker, num_microbatches))
        for microbatch in range(num_microbatches):
            if line.num(worker, Op.F) < num_microbatches:
                line.add(worker, Op.F)
            line.add(worker, Op.I, *[Op.W] * (microbatch >= worker))
        line.add(worker, *[Op.W] * (num_microbatches - line.num(worker, Op.W)))
        lists.append(tuple(line.actions))
    return tuple(lists)


def zbv(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Returns ZBV: two stages per worker (Qi et al., Pipeline Parallelism with Controllable Memory, 2024).

    If M < 2P - 1, it is the schedule for 2P - 1 microbatches without the actions on microbatches M and above.
    """
    ensure(stages_per_worker == 2, f"two stages per worker, not {stages_per_worker}")
    whole = max(2 * num_workers - 1, num_microbatches)
    lines = [_zbv_line(worker, num_workers, whole) for worker in range(num_workers)]
    return tuple(tuple(each for each in line.actions if each.microbatch < num_microbatches) for line in lines)


def _zbv_line(worker: int, num_workers: int, num_microbatches: int) -> WorkerList:
    line, down, up = WorkerList(), worker, 2 * num_workers - 1 - worker
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
