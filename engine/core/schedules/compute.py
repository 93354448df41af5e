"""Compute lists: the result of a schedule generator.

List n holds the compute actions of the n-th worker of a pipeline, in order. On every stage the forwards run in
microbatch order, and so do the backwards, whole or split. Gradients are therefore added in the same order with every
schedule, and the schedule does not change the bits of a result.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.action import FORWARD_OPS, Action, Op

ComputeLists = tuple[tuple[Action, ...], ...]
Generator = Callable[[int, int, int], ComputeLists]  # (workers P, stages per worker V, microbatches M)


def in_blocks(lists: ComputeLists, blocks: int) -> ComputeLists:
    """Returns the lists with each action of a stage as that of its blocks: forwards in their order, others backwards.

    A worker's actions take as long as before and in the same order, so time and residuals are those of `lists`.
    """
    if blocks == 1:
        return lists
    return tuple(tuple(each for action in line for each in _of_blocks(action, blocks)) for line in lists)


def _of_blocks(action: Action, blocks: int) -> tuple[Action, ...]:
    first = action.stage * blocks
    found = tuple(action._replace(stage=stage) for stage in range(first, first + blocks))
    return found if action.op in FORWARD_OPS else found[::-1]


class WorkerList:
    """Builder of the list of one worker: each action takes the next microbatch of its stage."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._taken: dict[tuple[int, Op], int] = {}

    def num(self, stage: int, op: Op) -> int:
        """Returns the number of microbatches of a stage to which an op was applied."""
        return self._taken.get((stage, op), 0)

    def add(self, stage: int, *ops: Op) -> None:
        """Adds ops of a stage, each on its next microbatch; a whole backward (B) counts as I and as W."""
        for op in ops:
            counted = Op.I if op is Op.B else op
            microbatch = self.num(stage, counted)
            self.actions.append(Action(stage, op, microbatch))
            self._taken[stage, counted] = microbatch + 1
            if op is Op.B:
                self._taken[stage, Op.W] = self.num(stage, Op.W) + 1
