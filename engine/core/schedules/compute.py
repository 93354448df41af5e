"""Compute lists: what a schedule generator returns, and how it counts microbatches.

A list holds the compute actions of one worker, in order; list n is that of the n-th worker of a pipeline. Of every
stage the forwards come in microbatch order, and so do the backwards, whole or in parts: gradients are always added in
the same order, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.action import Action, Op

ComputeLists = tuple[tuple[Action, ...], ...]
Generator = Callable[[int, int, int], ComputeLists]  # (workers P, stages per worker V, microbatches M)


class Line:
    """The list of one worker while it is made: each action takes the next microbatch of its stage."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._taken: dict[tuple[int, Op], int] = {}

    def num(self, stage: int, op: Op) -> int:
        """Returns how many microbatches of a stage an op has had."""
        return self._taken.get((stage, op), 0)

    def add(self, stage: int, *ops: Op) -> None:
        """Adds ops of a stage, each on its next microbatch; a whole backward counts as both of its parts."""
        for op in ops:
            counted = Op.I if op is Op.B else op
            microbatch = self.num(stage, counted)
            self.actions.append(Action(stage, op, microbatch))
            self._taken[stage, counted] = microbatch + 1
            if op is Op.B:
                self._taken[stage, Op.W] = self.num(stage, Op.W) + 1
