"""Lineage: from what is held to the tasks that are left of a step, backwards from what is missing.

Rules: what a worker holds is not made again, what another holds is sent, and the rest is made by the owner of the slot
that makes it, from what that needs. Only what the goal needs is done: every microbatch counted in the buffers and
added to the accumulator of each slot that is not done. A backward that has been added is redone for its input gradient
only. Nothing goes through a set in the set's order, so that every member finds the same.

A forward reads the buffers that the forwards before it have left. The owner's replica has the buffers before each
forward that it has counted: such a forward is redone without a trace. Any other forward counts, one after the other
from the step boundary on, also where the slot is done: its optimizer step takes the logged buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.core.action import FORWARD_OPS, Action, Op
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import Held, Kind, Value, needs

SENT_BY_SLOT = frozenset({Kind.ACTIVATION, Kind.GRADIENT})  # what goes from slot to slot; one copy will do for all

Tasks = dict[Action, tuple[Held, ...]]


def tasks_left(ownership: Ownership, held: Collection[Held] = (), done: Collection[Slot] = ()) -> Tasks:
    """Returns the compute actions that are left, and of what each needs that which another of them must make first.

    `done` are the slots of which the owner holds all that the optimizer step reads. Of a counter `held` gives the last
    index. Each action belongs to the owner of its slot.
    """
    last = ownership.grid.microbatches - 1
    there = frozenset(held)
    anywhere = frozenset(value for _, value in held if value.kind in SENT_BY_SLOT)
    how = _how_to_make(ownership, held, there, done)
    tasks: Tasks = {}
    wanted = [
        (ownership.owner(*slot), Value(kind, *slot, last))
        for slot in ownership.grid.slots()
        if slot not in done
        for kind in (Kind.COUNTED, Kind.ADDED)
    ]
    wanted = [need for need in wanted if need not in there]
    while wanted:
        action = how(wanted.pop()[1])
        if action in tasks:
            continue
        owner = ownership.owner(action.pipeline, action.stage)
        tasks[action] = tuple(
            need for need in needs(action, owner, ownership) if need not in there and need[1] not in anywhere
        )
        wanted += tasks[action]
    return tasks


def done_before(tasks: Tasks, held: Collection[Held]) -> frozenset[Action]:
    """Returns the tasks that somebody had done before, as far as what is held tells: replay is over when they are.

    A forward has been done if its activation is held, or the next stage has counted the microbatch; a backward if its
    gradient is held, or the stage before has added the microbatch. Nobody takes what the first stage's backward makes:
    there the gradient that it needs has to do.
    """
    values = frozenset(value for _, value in held)
    reached: dict[tuple[Kind, int, int], int] = {}
    for _, (kind, pipeline, stage, index) in held:
        reached[kind, pipeline, stage] = max(index, reached.get((kind, pipeline, stage), -1))

    def is_done(action: Action) -> bool:
        stage, op, microbatch, pipeline = action
        gone_on = microbatch <= reached.get((Kind.ADDED, pipeline, stage - 1), -1)
        back = gone_on or Value(Kind.GRADIENT, pipeline, max(stage, 1), microbatch) in values
        if op not in FORWARD_OPS:
            return back
        handed_on = Value(Kind.ACTIVATION, pipeline, stage, microbatch) in values
        return back or handed_on or microbatch <= reached.get((Kind.COUNTED, pipeline, stage + 1), -1)

    return frozenset(action for action in tasks if is_done(action))


def _how_to_make(
    ownership: Ownership, held: Collection[Held], there: Collection[Held], done: Collection[Slot]
) -> Callable[[Value], Action]:
    """Returns which action makes a value at the owner of its slot, after what the owner has counted and added."""
    everything = ownership.grid.microbatches
    progress: dict[tuple[Kind, int, int], int] = {}
    for pipeline, stage in done:
        progress[Kind.ADDED, pipeline, stage] = everything
    for place, (kind, pipeline, stage, index) in held:
        if kind in (Kind.COUNTED, Kind.ADDED) and place == ownership.owner(pipeline, stage):
            progress.setdefault((kind, pipeline, stage), index + 1)

    def how(value: Value) -> Action:
        kind, pipeline, stage, microbatch = value
        if kind in (Kind.ACTIVATION, Kind.RESIDUAL, Kind.COUNTED):
            again = microbatch < progress.get((Kind.COUNTED, pipeline, stage), 0)
            return Action(stage, Op.REDO_F if again else Op.F, microbatch, pipeline)
        # What a backward for the input has left for the one for the weights is not made again with it.
        split = (ownership.owner(pipeline, stage), Value(Kind.PENDING, pipeline, stage, microbatch)) in there
        if kind is Kind.ADDED:
            return Action(stage, Op.W if split else Op.B, microbatch, pipeline)
        again = split or microbatch < progress.get((Kind.ADDED, pipeline, stage), 0)
        return Action(stage, Op.I if again else Op.B, microbatch, pipeline)

    return how
