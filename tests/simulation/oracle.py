"""The oracle of plans: finds the least work that restores every gradient, without the planner.

Values that a survivor holds are not computed again; all others are. The oracle ignores order and transfers. It gives
the forwards and backwards that a plan must compute; a plan with more or fewer is wrong.
"""

from __future__ import annotations

from collections import Counter

from engine.core.action import COMPUTE_OPS, Op
from engine.core.ownership import Slot
from engine.core.program.inventory import Inventory
from engine.core.program.planner import Plan, PlanInput, healing_in, held_at_start
from engine.core.program.verify import verify
from engine.core.value import Kind, Value
from tests.simulation.case import Violation

Task = tuple[Op, int, int, int]  # op, pipeline, stage, microbatch


def _with_whole_backwards(tasks: Counter[Task]) -> Counter[Task]:
    """Returns the tasks with one backward for its two parts, which may come together because both are left to redo."""
    for _, *place in [task for task in tasks if task[0] is Op.W]:
        pipeline, stage, microbatch = place
        parts = [(op, pipeline, stage, microbatch) for op in (Op.I, Op.W)]
        if tasks[parts[0]]:
            tasks = tasks - Counter(parts)
            tasks[Op.B, pipeline, stage, microbatch] += 1
    return tasks


def check_plan(given: PlanInput, plan: Plan) -> None:
    """Raises Violation if a plan has the wrong step, loses values, computes too much or too little, or is invalid."""
    if plan.step != given.committed + 1:
        raise Violation(f"a plan of step {plan.step} after step {given.committed}")
    if plan.lost_stages != lost_stages(given):
        raise Violation(f"stages {plan.lost_stages} are lost by the plan, {lost_stages(given)} by the inventories")
    if plan.lost_stages:
        return
    computed = Counter(
        (action.op, action.pipeline, action.stage, action.microbatch)
        for actions in plan.program.values()
        for action in actions
        if action.op in COMPUTE_OPS
    )
    computed, least = _with_whole_backwards(computed), _with_whole_backwards(Counter(least_tasks(given)))
    if computed != least:
        more, less = computed - least, least - computed
        raise Violation(f"the plan computes {_words(more)} more and {_words(less)} less than it must")
    for violation in verify(plan.program, given.ownership, healing_in(given), held=held_at_start(given)):
        raise Violation(f"the plan is wrong: {violation}")


def lost_stages(given: PlanInput) -> tuple[int, ...]:
    """Returns the stages with a slot whose owner has no replica."""
    ownership = given.ownership
    held: dict[int, set[Slot]] = {each.worker: set(each.whole) for each in given.inventories}
    if not ownership.grid.fsdp:  # a slot stands for those of other pipelines
        pipelines = range(ownership.grid.pipelines)
        held = {worker: {(each, stage) for _, stage in whole for each in pipelines} for worker, whole in held.items()}
    return tuple(
        sorted({slot[1] for slot in ownership.grid.slots() if slot not in held.get(ownership.owner(*slot), ())})
    )


def least_tasks(given: PlanInput) -> list[Task]:
    """Returns the forwards and backwards that must be run."""
    return _Need(given).tasks()


class _Need:
    """Walks backwards from the missing gradients."""

    def __init__(self, given: PlanInput):
        self.ownership = given.ownership
        self.grid = given.ownership.grid
        self.held: dict[int, Inventory] = {
            each.worker: each for each in given.inventories if each.step == given.committed + 1
        }
        self.shipped = {(ship.slot, ship.microbatch) for ship in given.ships}
        self.added: dict[Slot, int] = {}  # by any worker with a replica
        for each in self.held.values():
            for slot in each.whole:
                self.added[slot] = max(self.added.get(slot, 0), each.added.get(slot, 0))
        self.anywhere = {value for each in self.held.values() for value in each.values}
        self.found: set[Task] = set()
        self.done = {slot for slot in self.grid.slots() if self._is_done(slot[1])}

    def _is_done(self, stage: int) -> bool:
        return all(
            self._has_logged(each, other)
            for other in (stage, *self.grid.tied_to(stage))
            for each in range(self.grid.pipelines)
        )

    def _has_logged(self, pipeline: int, stage: int) -> bool:
        held = self.held.get(self.ownership.owner(pipeline, stage))
        return held is not None and (pipeline, stage) in held.logged

    def tasks(self) -> list[Task]:
        for slot in self.grid.slots():
            if slot in self.done:
                continue
            counted, added = self._counters(slot)
            for microbatch in range(counted, self.grid.microbatches):
                self._forward(slot, microbatch)
            for microbatch in range(added, self.grid.microbatches):
                if self._is_pending(slot, microbatch):
                    self.found.add((Op.W, *slot, microbatch))
                else:
                    self._backward(Op.B, slot, microbatch)
        return sorted(self.found)

    def _is_pending(self, slot: Slot, microbatch: int) -> bool:
        """Whether the backward for the input has run, and the backward for the weights has not."""
        held = self.held.get(self.ownership.owner(*slot))
        return held is not None and Value(Kind.PENDING, *slot, microbatch) in held.values

    def _counters(self, slot: Slot) -> tuple[int, int]:
        """Returns the number of forwards in the owner's buffers, and of backwards that need not be added again."""
        held = self.held.get(self.ownership.owner(*slot))
        counted = held.counted.get(slot, 0) if held and slot in held.whole else 0
        added = self.added.get(slot, 0)
        counted = max(counted, added)  # an accumulator comes with its forwards
        while (slot, counted) in self.shipped:
            counted += 1
        return counted, self.grid.microbatches if slot in self.done else added

    def _forward(self, slot: Slot, microbatch: int) -> None:
        """Adds a forward; it reads the buffers of the forward before, so all uncounted forwards come before it."""
        pipeline, stage = slot
        counted, _ = self._counters(slot)
        task = (Op.REDO_F if microbatch < counted else Op.F, *slot, microbatch)
        if task in self.found:
            return
        self.found.add(task)
        if microbatch > counted or not self._has(Kind.RESIDUAL, slot, microbatch - 1, microbatch):
            self._forward(slot, microbatch - 1)
        if stage > 0 and Value(Kind.ACTIVATION, pipeline, stage - 1, microbatch) not in self.anywhere:
            self._forward((pipeline, stage - 1), microbatch)

    def _has(self, kind: Kind, slot: Slot, index: int, microbatch: int) -> bool:
        """Whether the owner holds what a slice needs of the slice before; the first one needs nothing."""
        held = self.held.get(self.ownership.owner(*slot))
        is_first = microbatch % self.grid.slices == 0
        return is_first or (held is not None and Value(kind, *slot, index) in held.values)

    def _backward(self, op: Op, slot: Slot, microbatch: int) -> None:
        task = (op, *slot, microbatch)
        if task in self.found:
            return
        self.found.add(task)
        pipeline, stage = slot
        held = self.held.get(self.ownership.owner(*slot))
        slices = self.grid.slices
        of_forward = microbatch + slices - 1 - 2 * (microbatch % slices)
        kept = held is not None and Value(Kind.RESIDUAL, pipeline, stage, of_forward) in held.values
        if not kept and (slot, of_forward) not in self.shipped:
            self._forward(slot, of_forward)
        has_run = microbatch - 1 < self._counters(slot)[1] or self._is_pending(slot, microbatch - 1)
        if has_run and not self._has(Kind.CARRY, slot, microbatch - 1, microbatch):
            self._backward(Op.I, slot, microbatch - 1)
        after = Value(Kind.GRADIENT, pipeline, stage + 1, microbatch)
        there = stage + 1 == self.grid.stages or after in self.anywhere
        following = (pipeline, stage + 1)
        if not there and (microbatch < self._counters(following)[1] or self._is_pending(following, microbatch)):
            self._backward(Op.I, following, microbatch)


def _words(tasks: Counter[Task]) -> str:
    return (
        " ".join(f"{stage}{op}{microbatch}@{pipeline}" for op, pipeline, stage, microbatch in sorted(tasks))
        or "nothing"
    )
