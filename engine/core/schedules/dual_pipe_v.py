"""DualPipeV: each worker has one stage on the way down a V and one on the way up (after DeepSeek's DualPipe).

In the middle of a step, a worker alternates a forward of one of its stages with a backward of the other; a device that
can run both at once may overlap them. Backwards are split only where a weight gradient fills a gap. P = 2, M = 4:

    worker 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 -   3F2 0B0 -   3B2 -   3F3     0B1 -   3B3 -   0I2 0W2 0I3 0W3
    worker 1      1F0 2F0 1F1 2F1 1F2 2B0 -   2F2 1B0 -   1F3 2B1 -   2F3 1B1 -   2B2 -   1B2 -   2I3 1I3 2W3 1W3
"""

from __future__ import annotations

from collections import deque

from engine.core.action import Op
from engine.core.errors import ensure
from engine.core.schedules.compute import ComputeLists, WorkerList


def dual_pipe_v(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Returns DualPipeV (github.com/deepseek-ai/DualPipe, the cut-in-half form); needs M >= 2P."""
    ensure(stages_per_worker == 2, f"two stages per worker, not {stages_per_worker}")
    ensure(num_microbatches >= 2 * num_workers, f"{num_microbatches} microbatches for {num_workers} workers")
    return tuple(tuple(_line(worker, num_workers, num_microbatches).actions) for worker in range(num_workers))


def _line(worker: int, num_workers: int, num_microbatches: int) -> WorkerList:
    line, down, up = WorkerList(), worker, 2 * num_workers - 1 - worker
    behind = num_workers - 1 - worker
    line.add(down, *[Op.F] * (2 * behind))
    for _ in range(worker + 1):
        line.add(down, Op.F)
        line.add(up, Op.F)
    for _ in range(behind):
        line.add(up, Op.I, Op.W, Op.F)
    for _ in range(num_microbatches - 2 * num_workers + worker + 1):
        _cross(line, down, up)
        _cross(line, up, down)
    for _ in range(behind):
        line.add(up, Op.B)
        _cross(line, up, down)
    _drain(line, worker, behind, (up, down))
    return line


def _cross(line: WorkerList, forward: int, backward: int) -> None:
    line.add(forward, Op.F)
    line.add(backward, Op.B)


def _drain(line: WorkerList, worker: int, behind: int, stages: tuple[int, int]) -> None:
    """Runs the last backwards; later ones are split, and their weight gradients fill the gaps between the next ones."""
    put_off: deque[int] = deque()
    number = 0

    def back(stage: int) -> None:
        nonlocal number
        if number <= worker:
            line.add(stage, Op.B)
        else:
            line.add(stage, Op.I)
            put_off.append(stage)
        number += 1

    for _ in range(worker + 1):
        for stage in stages:
            back(stage)
    for _ in range(behind):
        if put_off:
            line.add(put_off.popleft(), Op.W)
        back(stages[1])
    while put_off:
        line.add(put_off.popleft(), Op.W)
