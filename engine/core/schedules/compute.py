"""Compute lists: the result of a schedule generator.

List n holds the compute actions of the n-th worker of a pipeline, in order. On every stage the forwards run in
microbatch order, and so do the backwards, whole or split. Gradients are therefore added in the same order with every
schedule, and the schedule does not change the bits of a result.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.action import Action, Op

ComputeLists = tuple[tuple[Action, ...], ...]
Generator = Callable[[int, int, int], ComputeLists]  # (workers P, stages per worker V, microbatches M)


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
