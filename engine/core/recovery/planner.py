"""The recovery planner: from what the survivors hold to a program for the rest of the step.

It walks backwards from what is still missing (every slot's gradient at its owner): a value that a live worker holds is
transferred, one that nobody holds is recomputed, recursively. A backward that has counted already is redone for its
input gradient only, a forward that its owner has counted already without a trace, so that nothing counts twice. There
is no case for the first or the last stage, nor for a failure during recovery: that is the same function of new
inventories.

Inventories decide, never the ownership: a replica counts when it is whole. What is logged of a group of tied stages
counts when the owners of all its slots hold it; else none of it does, and the accumulators go on from where they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.core.errors import InvariantError
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.build import Program
from engine.core.program.dependencies import WIRE, Held, Kind, Value
from engine.core.program.dry_run import refuse_stuck
from engine.core.program.list_scheduler import list_schedule
from engine.core.program.remaining_tasks import done_before, tasks_left
from engine.core.program.step_end_pass import with_end_of_step
from engine.core.program.transfer_pass import with_transfers
from engine.core.recovery.inventory import Inventory


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The one document that every member makes the plan from. Step ``committed + 1`` is to be finished."""

    epoch: int
    committed: int
    ownership: Ownership  # as the verdict left it: heirs are owners, surviving replicas are shadows
    inventories: tuple[Inventory, ...]  # of every member, by worker


@dataclass(frozen=True, slots=True)
class Plan:
    """What the members do to finish the step. An owner builds `adopted` slots from another pipeline's replica."""

    step: int
    program: Program
    adopted: tuple[Slot, ...]
    lost_stages: tuple[int, ...]  # of which no owner has a whole replica: nothing can be run
    digest: str  # SHA-256 over all of it, the same on every member


def make_plan(given: PlanInput) -> Plan:
    """Returns the plan; its program has passed its own dry run. Raises InvariantError when the input cannot be."""
    _refuse_nonsense(given)
    ownership, step = given.ownership, given.committed + 1
    whole = {inventory.worker: frozenset(inventory.whole) for inventory in given.inventories}
    adopted = tuple(slot for slot in ownership.grid.slots() if slot not in whole[ownership.owner(*slot)])
    lost = tuple(sorted({slot[1] for slot in adopted if not _stands_for(slot, whole[ownership.owner(*slot)])}))
    if lost:
        return _digested(Plan(step, {}, (), lost, ""))
    done, held = _done(given), held_at_start(given)
    healing = frozenset(
        (worker, slot)
        for slot in ownership.grid.slots()
        for worker in ownership.shadows_of(*slot)
        if slot not in whole[worker]
    )
    tasks = tasks_left(ownership, held, done)
    compute = list_schedule(tasks, ownership, first=done_before(tasks, held))
    members = {worker: compute.get(worker, ()) for worker in whole}
    program = with_end_of_step(with_transfers(members, ownership, held), ownership, held, healing)
    refuse_stuck(program, ownership, held)
    return _digested(Plan(step, program, adopted, (), ""))


def _refuse_nonsense(given: PlanInput) -> None:
    grid, members = given.ownership.grid, [inventory.worker for inventory in given.inventories]
    if members != sorted(set(members)):
        raise InvariantError(f"expected one inventory of each member, in order, found {members}")
    absent = [worker for worker in given.ownership.workers() if worker not in members]
    if absent:
        raise InvariantError(f"workers {absent} own or shadow a slot, and there is no inventory of them")
    for inventory in given.inventories:
        if inventory.step - given.committed not in (0, 1):
            raise InvariantError(
                f"worker {inventory.worker} is at step {inventory.step} while {given.committed} is the last committed"
            )
        counts = (*inventory.counted.values(), *inventory.added.values())
        if not all(0 <= count <= grid.microbatches for count in counts):
            raise InvariantError(f"worker {inventory.worker} has taken in more than {grid.microbatches} microbatches")


def _stands_for(slot: Slot, whole: Collection[Slot]) -> bool:
    return any(stage == slot[1] for _, stage in whole)


def _done(given: PlanInput) -> frozenset[Slot]:
    """Returns the slots whose owner holds all that the optimizer step reads; groups of tied stages in whole only."""
    ownership, grid = given.ownership, given.ownership.grid
    logged = {each.worker: frozenset(each.logged) for each in given.inventories if each.step == given.committed + 1}
    whole_stages = {
        stage
        for stage in range(grid.stages)
        if all((d, stage) in logged.get(ownership.owner(d, stage), ()) for d in range(grid.pipelines))
    }
    return frozenset(slot for slot in grid.slots() if all(each in whole_stages for each in _group(slot[1], grid)))


def _group(stage: int, grid: Grid) -> list[int]:
    """Returns the stages that `stage` shares a parameter with, directly or over others, and itself."""
    group = [stage]
    for each in group:  # it grows while it is walked
        group += [other for other in grid.tied_to(each) if other not in group]
    return group


def held_at_start(given: PlanInput) -> tuple[Held, ...]:
    """Returns what the plan begins with; of a counter the last index, which is all that anything needs."""
    return tuple(_held(given, _done(given)))


def _held(given: PlanInput, done: Collection[Slot]) -> Iterator[Held]:
    ownership = given.ownership
    for inventory in given.inventories:
        if inventory.step == given.committed:
            continue  # it takes its optimizer steps first, and drops all that was of the step before
        worker = inventory.worker
        yield from ((worker, value) for value in inventory.values)
        for slot in ownership.slots_of(worker):
            if slot in done:
                reduced = Value(Kind.REDUCED, *slot)
                yield from ((worker, reduced), (WIRE, reduced), (worker, Value(Kind.LOGGED, *slot)))
            if slot in inventory.whole:
                for kind, counts in ((Kind.COUNTED, inventory.counted), (Kind.ADDED, inventory.added)):
                    if counts.get(slot, 0):
                        yield worker, Value(kind, *slot, counts[slot] - 1)
        for slot in ownership.shadowed_by(worker):
            if slot in done and slot in inventory.logged:
                yield worker, Value(Kind.LOGGED, *slot)


def _digested(plan: Plan) -> Plan:
    lines = [
        f"step {plan.step}",
        f"adopted {plan.adopted}",
        f"lost {plan.lost_stages}",
        *(f"{worker} {' '.join(map(str, actions))}" for worker, actions in plan.program.items()),
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Plan(plan.step, plan.program, plan.adopted, plan.lost_stages, digest)
