"""Replay: the part of a recovery that does work again which was done before the failure.

before the failure   2F0 2F1 2B0 ...            work that is lost with the worker of stage 2
recovery             2f0 2F1 2B0 | 2F2 2B1 ...  replay is over at the bar: this is the catch-up point
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.core.action import OP_TABLE, Action, Op
from engine.core.value import Held, Kind

_FIRST = {op: Op(row.redoes) for op, row in OP_TABLE.items() if row.redoes}


def work_of(action: Action) -> Action:
    """Returns the action that first did the work of `action`: itself, unless its op makes an output again."""
    first = _FIRST.get(action.op)
    return action._replace(op=first) if first else action


def replayed(actions: Iterable[Action], done: Iterable[Action]) -> list[Action]:
    """Returns those of `actions`, in order, that do the work of `done` again; replay is over when the last one ends."""
    work = frozenset(map(work_of, done))
    return [action for action in actions if work_of(action) in work] if work else []


def shown_by(held: Iterable[Held]) -> Iterator[Action]:
    """Yields the actions that a worker must have run before, because of the values that workers hold.

    An activation shows its forward, and so does the counter of the next stage. A gradient shows its backward, and so
    does the counter of the stage before. A backward shows its forward. The gradient of stage 0 is never used; there the
    gradient of stage 1 stands in for it.
    """
    for _, (kind, pipeline, stage, index) in held:
        if kind is Kind.ACTIVATION:
            yield Action(stage, Op.F, index, pipeline)
        elif kind is Kind.COUNTED:
            yield from (Action(stage - 1, Op.F, each, pipeline) for each in range(index + 1))
        elif kind is Kind.ADDED:
            for each in range(index + 1):
                yield from _through(stage + 1, each, pipeline)
        elif kind is Kind.GRADIENT and stage > 0:
            for at in (0, 1) if stage == 1 else (stage,):
                yield from _through(at, index, pipeline)


def _through(stage: int, microbatch: int, pipeline: int) -> Iterator[Action]:
    return (Action(stage, op, microbatch, pipeline) for op in (Op.F, Op.B, Op.W))
