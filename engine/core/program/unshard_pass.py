"""The pass that says when the weights of a stage are whole: they lie in shards over the pipelines in between.

Rules: a compute action finds its stage whole, at most `max_active` stages of a worker are whole at once, and at the end
of the step none is. The next stages that a worker needs are made whole ahead of their use; to make room, the one that
is needed last goes first. Every pipeline has the same lists, so the owners of a stage meet in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine.core.action import Action, Op
from engine.core.ownership import Slot


def with_unshards(program: Mapping[int, tuple[Action, ...]], max_active: int) -> dict[int, tuple[Action, ...]]:
    """Returns a program of compute actions with UNSHARD and RESHARD around them."""
    return {worker: tuple(_with_unshards(actions, max_active)) for worker, actions in program.items()}


def _with_unshards(actions: Sequence[Action], max_active: int) -> Iterator[Action]:
    whole: list[Slot] = []
    for action, wanted in zip(actions, _next_slots(actions, max_active), strict=True):
        yield from (_on(Op.RESHARD, slot) for slot in whole if slot not in wanted)
        yield from (_on(Op.UNSHARD, slot) for slot in wanted if slot not in whole)
        whole = wanted
        yield action
    yield from (_on(Op.RESHARD, slot) for slot in whole)


def _next_slots(actions: Sequence[Action], most: int) -> list[list[Slot]]:
    """Returns for each action its slot and those of the actions behind it, by their next use, at most so many."""
    found: list[list[Slot]] = []
    order: list[Slot] = []
    for action in reversed(actions):
        slot = (action.pipeline, action.stage)
        order = [slot, *(each for each in order if each != slot)]
        found.append(order[:most])
    return found[::-1]


def _on(op: Op, slot: Slot) -> Action:
    pipeline, stage = slot
    return Action(stage, op, pipeline=pipeline)
