"""DualPipeV: the two ends of a V feed the pipeline's two directions from one worker (after DeepSeek's DualPipe).

In its middle part a forward of one stage stands before a backward of the other, each of another direction; a device
that can run both at once may overlap them. Weight gradients are split off only where they fill a gap.
"""

from __future__ import annotations

from collections import deque

from engine.core.action import Op
from engine.core.schedules.compute import ComputeLists, Line


def dual_pipe_v(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """DualPipeV (github.com/deepseek-ai/DualPipe, the cut-in-half form); needs M >= 2P."""
    assert stages_per_worker == 2
    assert num_microbatches >= 2 * num_workers
    return tuple(tuple(_line(worker, num_workers, num_microbatches).actions) for worker in range(num_workers))


def _line(worker: int, num_workers: int, num_microbatches: int) -> Line:
    line, down, up = Line(), worker, 2 * num_workers - 1 - worker
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


def _cross(line: Line, forward: int, backward: int) -> None:
    line.add(forward, Op.F)
    line.add(backward, Op.B)


def _drain(line: Line, worker: int, behind: int, stages: tuple[int, int]) -> None:
    """Runs the last backwards; the second half of them puts its weight gradients off, to fill what follows."""
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
