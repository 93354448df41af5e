"""Time that passes while compute lists run: the oracle of schedules, which knows nothing of the engine's rule."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.action import Action, Op
from engine.core.program.schedules import ComputeLists

_KIND = {Op.F: 0, Op.B: 1, Op.I: 1, Op.W: 2}
_NEVER = -1


def passed(lists: ComputeLists, cost: Callable[[Action], float]) -> tuple[list[float], float]:
    """Returns how long each worker waits between its first and last action, and the whole length."""
    num_microbatches = 1 + max(action.microbatch for action in lists[0])
    num_stages = 1 + max(action.stage for line in lists for action in line)
    one_stage, whole = num_microbatches, num_stages * num_microbatches
    at: list[float] = [_NEVER] * (3 * whole)  # when a forward, a gradient of the input, one of the weights is there
    costs = {op: cost(Action(0, op, 0)) for op in _KIND}
    free, begun, work = [0.0] * len(lists), [float(_NEVER)] * len(lists), [0.0] * len(lists)
    rest = [iter(line) for line in lists]
    heads = [next(line, None) for line in rest]
    moved = True
    while moved:
        moved = False
        for worker, line in enumerate(rest):
            head, now = heads[worker], free[worker]
            while head is not None:
                stage, op, microbatch, _ = head
                kind, place = _KIND[op], stage * one_stage + microbatch
                start = now
                awaited: tuple[int, ...]
                if kind == 0:
                    awaited = (place - one_stage,) if stage else ()
                elif kind == 2:
                    awaited = (whole + place,)
                else:
                    awaited = (place, whole + place + one_stage) if stage < num_stages - 1 else (place,)
                for event in awaited:
                    if at[event] == _NEVER:
                        break
                    start = max(start, at[event])
                else:
                    if begun[worker] == _NEVER:
                        begun[worker] = start
                    work[worker] += costs[op]
                    now = at[kind * whole + place] = start + costs[op]
                    head, moved = next(line, None), True
                    continue
                break
            heads[worker], free[worker] = head, now
    assert heads == [None] * len(lists), "the lists wait for each other"
    return [end - start - busy for end, start, busy in zip(free, begun, work, strict=True)], max(free)
