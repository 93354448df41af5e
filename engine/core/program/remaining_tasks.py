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

from collections.abc import Collection, Sequence
from itertools import repeat

from engine.core.action import Action, Op, make_action
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import needs
from engine.core.value import Held, Kind

SENT_BY_SLOT = frozenset({Kind.ACTIVATION, Kind.GRADIENT})  # they go from slot to slot; one copy is enough

Tasks = dict[Action, list[Action]]
_Makers = Sequence[Action | None]  # by index of the value; None if the value is there


def tasks_left(ownership: Ownership, held: Collection[Held] = (), done: Collection[Slot] = ()) -> Tasks:
    """Returns the compute actions that are left, each with the ones that make a value that it needs.

    `done` are the slots whose owner holds the inputs of the optimizer step. For a counter `held` has the last index
    only. Each action belongs to the owner of its slot.
    """
    makers = _MakersOfValues(ownership, held, done)
    lines: dict[tuple[int, Op, bool, int], list[tuple[_Makers, int]]] = {}  # the first microbatch may need fewer values
    tasks: Tasks = {}
    counters = (makers[kind, *slot] for slot in ownership.grid.slots() if slot not in done for kind in _COUNTERS)
    wanted = [makes[-1] for makes in counters if makes[-1] is not None]
    while wanted:
        action = wanted.pop()
        if action in tasks:
            continue
        stage, op, microbatch, pipeline = action
        line = lines.get((stage, op, microbatch > 0, pipeline))
        if line is None:
            values = [value for _, value in needs(action, ownership.owner(pipeline, stage), ownership)]
            line = [(makers[value[:3]], value.index - microbatch) for value in values]
            lines[stage, op, microbatch > 0, pipeline] = line
        tasks[action] = before = [each for makes, more in line if (each := makes[microbatch + more]) is not None]
        wanted += before
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


_COUNTERS = (Kind.COUNTED, Kind.ADDED)


class _MakersOfValues(dict[tuple[Kind, int, int], _Makers]):
    """The actions by which the owner of a slot makes its values, by kind, pipeline and stage; counters decide them."""

    def __init__(self, ownership: Ownership, held: Collection[Held], done: Collection[Slot]):
        self._all = range(ownership.grid.microbatches)
        self._progress = progress_of(ownership, held, done)
        self._there: dict[tuple[Kind, int, int], set[int]] = {}
        for place, (kind, pipeline, stage, index) in held:
            if kind in SENT_BY_SLOT or place == ownership.owner(pipeline, stage):
                self._there.setdefault((kind, pipeline, stage), set()).add(index)

    def __missing__(self, key: tuple[Kind, int, int]) -> _Makers:
        _, pipeline, stage = key
        there = self._there.get(key, ())
        actions = map(make_action, repeat(stage), self._ops(*key), self._all, repeat(pipeline))
        self[key] = found = [None if action.microbatch in there else action for action in actions]
        return found

    def _ops(self, kind: Kind, pipeline: int, stage: int) -> list[Op]:
        if kind in (Kind.ACTIVATION, Kind.RESIDUAL, Kind.COUNTED):
            counted = self._progress.get((Kind.COUNTED, pipeline, stage), 0)
            return [Op.REDO_F if each < counted else Op.F for each in self._all]
        # If the owner has run the backward for the input, it has only the one for the weights left.
        split = self._there.get((Kind.PENDING, pipeline, stage), ())
        if kind is Kind.ADDED:
            return [Op.W if each in split else Op.B for each in self._all]
        added = self._progress.get((Kind.ADDED, pipeline, stage), 0)
        return [Op.I if each < added or each in split else Op.B for each in self._all]
