"""Lineage: from the values that workers hold to the tasks that are left of a step, backwards from missing values.

The goal is that every microbatch is counted in the buffers and added to the accumulator of each slot that is not done.
A value that its worker holds is not made again. A value that another worker holds is sent. Any other value is made by
the owner of its slot, from the values that this needs. Suppose the worker of stage 1 died after 1B0:

    wanted   ADDED 1 of stage 1 <- 1B1 <- 1F1 <- activation of 0F1, which is held and sent
                                <- 1B0 <- 1F0 <- activation of 0F0, which is not held <- 0f0

A backward that has been added is redone for its input gradient only. Loops never follow the order of a set, so that
every member finds the same tasks in the same order.

A forward reads the buffers that the forward before it has left. The owner's replica keeps the buffers before each
forward that it has counted, so such a forward is redone without an update. Any other forward counts, one after the
other from the step boundary on. This holds for a slot that is done too: its optimizer step takes the logged buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.core.action import Action, Op
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import needs
from engine.core.value import Held, Kind, Value

SENT_BY_SLOT = frozenset({Kind.ACTIVATION, Kind.GRADIENT})  # they go from slot to slot; one copy is enough

Tasks = dict[Action, tuple[Held, ...]]


def tasks_left(ownership: Ownership, held: Collection[Held] = (), done: Collection[Slot] = ()) -> Tasks:
    """Returns the compute actions that are left, each with the values that another one of them must make first.

    `done` are the slots whose owner holds the inputs of the optimizer step. For a counter `held` has the last index
    only. Each action belongs to the owner of its slot.
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


def progress_of(
    ownership: Ownership, held: Collection[Held], done: Collection[Slot]
) -> dict[tuple[Kind, int, int], int]:
    """Returns how many microbatches the owner of a slot has counted and added, by kind, pipeline and stage."""
    progress = {(Kind.ADDED, *slot): ownership.grid.microbatches for slot in done}
    for place, (kind, pipeline, stage, index) in held:
        if kind in (Kind.COUNTED, Kind.ADDED) and place == ownership.owner(pipeline, stage):
            progress.setdefault((kind, pipeline, stage), index + 1)
    return progress


def _how_to_make(
    ownership: Ownership, held: Collection[Held], there: Collection[Held], done: Collection[Slot]
) -> Callable[[Value], Action]:
    """Returns the rule that gives the action by which the owner of a slot makes a value; counters decide it."""
    progress = progress_of(ownership, held, done)

    def how(value: Value) -> Action:
        kind, pipeline, stage, microbatch = value
        if kind in (Kind.ACTIVATION, Kind.RESIDUAL, Kind.COUNTED):
            again = microbatch < progress.get((Kind.COUNTED, pipeline, stage), 0)
            return Action(stage, Op.REDO_F if again else Op.F, microbatch, pipeline)
        # If the owner has run the backward for the input, it has only the one for the weights left.
        split = (ownership.owner(pipeline, stage), Value(Kind.PENDING, pipeline, stage, microbatch)) in there
        if kind is Kind.ADDED:
            return Action(stage, Op.W if split else Op.B, microbatch, pipeline)
        again = split or microbatch < progress.get((Kind.ADDED, pipeline, stage), 0)
        return Action(stage, Op.I if again else Op.B, microbatch, pipeline)

    return how
