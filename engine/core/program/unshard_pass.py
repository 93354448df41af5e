"""The pass that gathers and frees the weights of stages, which otherwise lie in shards over the pipelines.

At most `max_active` stages of a worker are whole at once, and at the end of the step none is. The next stages that a
worker needs are gathered ahead of their use. To make room, the stage whose next use is last is freed. With one stage
whole at once:

    worker 0   0UNSHARD 0F0 0RESHARD 2UNSHARD 2F0 2B0 2RESHARD 0UNSHARD 0B0 0RESHARD

Every pipeline has the same lists, so the owners of a stage meet in the same order. Where the list scheduler orders the
actions, the pipelines have different ones: then each stage is whole at all its owners, for all actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine.core.action import Action, Op
from engine.core.ownership import Ownership, Slot


def with_unshards(program: Mapping[int, tuple[Action, ...]], max_active: int) -> dict[int, tuple[Action, ...]]:
    """Returns a program of compute actions, the same in all pipelines, with UNSHARD and RESHARD around them."""
    return {worker: tuple(_with_unshards(actions, max_active)) for worker, actions in program.items()}


def with_whole_stages(program: Mapping[int, tuple[Action, ...]], ownership: Ownership) -> dict[int, tuple[Action, ...]]:
    """Returns a program of compute actions with UNSHARD before all of them, and RESHARD behind, at all owners."""
    stages = sorted({action.stage for actions in program.values() for action in actions})
    return {
        worker: (*_at(worker, Op.UNSHARD, stages, ownership), *actions, *_at(worker, Op.RESHARD, stages, ownership))
        for worker, actions in program.items()
    }


def _at(worker: int, op: Op, stages: Sequence[int], ownership: Ownership) -> Iterator[Action]:
    for stage in stages:
        yield from (_on(op, (pipeline, stage)) for pipeline in ownership.pipelines_of(worker, stage)[:1])


def _with_unshards(actions: Sequence[Action], max_active: int) -> Iterator[Action]:
    whole: list[Slot] = []
    for action, wanted in zip(actions, _next_slots(actions, max_active), strict=True):
        yield from (_on(Op.RESHARD, slot) for slot in whole if slot not in wanted)
        yield from (_on(Op.UNSHARD, slot) for slot in wanted if slot not in whole)
        whole = wanted
        yield action
    yield from (_on(Op.RESHARD, slot) for slot in whole)


def _next_slots(actions: Sequence[Action], most: int) -> list[list[Slot]]:
    """Returns for each action the next `most` slots, its own first, in the order of their next use."""
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
