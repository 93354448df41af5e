"""The pass that adds the end of a step: reduce, log, commit and step for every replica, and healing of new shadows.

Rules: every worker goes through the same stages in the same order, owners before shadows, so that nobody waits in a
circle. What is held already is not made again. A new shadow's state is sent before the first wait of the one that has
it, for what the first stage does before that, the others wait for; so it comes whatever becomes of them. It is received
behind the last SEND of the one that gets it: from there on nobody waits for that worker but at the end of the step, and
it may have to wait for others anyhow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from engine.core.action import RECEIVE_OPS, SEND_OPS, Action, Op
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import Held, Kind, Value

_MAY_WAIT = RECEIVE_OPS | {Op.STREAM}


def with_end_of_step(
    program: Mapping[int, tuple[Action, ...]],
    ownership: Ownership,
    held: Collection[Held] = (),
    healing: Collection[tuple[int, Slot]] = (),
) -> dict[int, tuple[Action, ...]]:
    """Returns the program with what follows the backwards; `healing` are shadows that get their slot's state.

    A slot of which the owner holds what is reduced at the start is not reduced again; its LOG is sent to whom lacks it.
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
    last = max((position for position, action in enumerate(actions, 1) if action.op in SEND_OPS), default=0)
    waits = (position for position, action in enumerate(actions) if action.op in _MAY_WAIT)
    first = min(next(waits, 0), last)  # to take a state is to wait, too
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
