"""The pass that adds the end of a step: reduce, log, commit and step for every replica, and healing of new shadows.

Every worker goes through the same stages in the same order, owners before shadows, so that workers never wait in a
circle. A value that is held at the start is not made again.

    owner    ... last backward  REDUCE_GRAD  LOG  COMMIT  STEP
    shadow   ...                             LOG  COMMIT  STEP

The owner of a slot sends its state to a new shadow before the owner's first wait, so the state arrives even if other
workers fail later. It cannot be sooner on the first stage: the other workers wait for its first forwards. The shadow
receives the state behind its last SEND or UNSHARD: from there on other workers wait for it at the end of the step only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from engine.core.action import OP_TABLE, SEND_OPS, Action, Op
from engine.core.op_row import Where
from engine.core.ownership import Ownership, Slot
from engine.core.value import Held, Kind, Value

_MEETS = frozenset(op for op, row in OP_TABLE.items() if row.meets)
_MAY_WAIT = _MEETS | {op for op, row in OP_TABLE.items() if any(term.at is Where.WIRE for term in row.needs)}
_AWAITED = _MEETS | SEND_OPS


def with_end_of_step(
    program: Mapping[int, tuple[Action, ...]],
    ownership: Ownership,
    held: Collection[Held] = (),
    healing: Collection[tuple[int, Slot]] = (),
) -> dict[int, tuple[Action, ...]]:
    """Returns the program with the actions behind the backwards; `healing` are shadows that get their slot's state.

    If the owner of a slot holds the reduced gradient at the start, the slot is not reduced again. The owner sends its
    LOG to the shadows that lack it.
    """
    there = frozenset(each for each in held if each[1].kind in (Kind.REDUCED, Kind.LOGGED))
    return {
        worker: (*_with_heals(worker, actions, ownership, healing), *_end(worker, ownership, there))
        for worker, actions in program.items()
    }


def _by_stage(slots: Collection[Slot]) -> list[Slot]:
    return sorted(slots, key=lambda slot: (slot[1], slot[0]))


def _with_heals(
    worker: int, actions: Sequence[Action], ownership: Ownership, healing: Collection[tuple[int, Slot]]
) -> list[Action]:
    sent = {slot for _, slot in healing if ownership.owner(*slot) == worker}
    taken = {slot for taker, slot in healing if taker == worker}
    last = max((position for position, action in enumerate(actions, 1) if action.op in _AWAITED), default=0)
    waits = (position for position, action in enumerate(actions) if action.op in _MAY_WAIT)
    first = min(next(waits, 0), last)  # the receipt of a state is a wait too
    return [*actions[:first], *_heals(sent), *actions[first:last], *_heals(taken), *actions[last:]]


def _heals(slots: Collection[Slot]) -> list[Action]:
    return [Action(stage, Op.HEAL, pipeline=pipeline) for pipeline, stage in _by_stage(slots)]


def _end(worker: int, ownership: Ownership, there: Collection[Held]) -> list[Action]:
    owned, shadowed = _by_stage(ownership.slots_of(worker)), _by_stage(ownership.shadowed_by(worker))
    first = {stage: (pipeline, stage) for pipeline, stage in reversed(owned)}
    end = [
        Action(stage, Op.REDUCE_GRAD, pipeline=pipeline)
        for pipeline, stage in owned
        if first[stage] == (pipeline, stage) and (worker, Value(Kind.REDUCED, pipeline, stage)) not in there
    ]
    end += [Action(stage, Op.LOG, pipeline=pipeline) for pipeline, stage in owned]
    end += [
        Action(stage, Op.LOG, pipeline=pipeline)
        for pipeline, stage in shadowed
        if (worker, Value(Kind.LOGGED, pipeline, stage)) not in there
    ]
    end += [Action(s, op, pipeline=d) for op in (Op.COMMIT, Op.STEP) for d, s in (*owned, *shadowed)]
    return end
