"""The recovery planner: from the inventories of the survivors to a program for the rest of the step.

It walks backwards from the values that are missing: the gradient of every slot at its owner. A value that a live worker
holds is sent, an accumulator too (`handing.py`); any other value is recomputed, recursively. A backward that has been
added is redone for its input gradient only, and a forward that its owner has counted is redone without an update. So no
microbatch counts twice. The planner has no special case for the first or the last stage. A failure during recovery
needs none either: the planner runs again, on new inventories.

    inventories -> tasks that are left -> order on each worker, replay first -> transfers -> end of the step

Inventories decide, not the ownership: a replica counts if it is whole. The LOGGED values of a group of tied stages
count only if the owners of all slots of the group hold them; else the accumulators go on from their counters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.core.errors import InvariantError
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.dry_run import refuse_stuck
from engine.core.program.list_scheduler import list_schedule
from engine.core.program.remaining_tasks import tasks_left
from engine.core.program.replay import replayed, shown_by
from engine.core.program.step_end_pass import with_end_of_step
from engine.core.program.transfer_pass import with_transfers
from engine.core.program.unshard_pass import with_whole_stages
from engine.core.recovery.handing import Hand, hands_in, held_after, with_hands
from engine.core.recovery.inventory import Inventory
from engine.core.recovery.plan import Plan
from engine.core.value import WIRE, Held, Kind, Value


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The document from which every member makes the plan of step ``committed + 1``."""

    epoch: int
    committed: int
    ownership: Ownership  # after the verdict: heirs are owners, surviving replicas are shadows
    inventories: tuple[Inventory, ...]  # of every member, by worker


def make_plan(given: PlanInput) -> Plan:
    """Returns the plan; its program has passed a dry run. Raises InvariantError if the input is impossible."""
    _refuse_nonsense(given)
    ownership, step = given.ownership, given.committed + 1
    whole = {inventory.worker: frozenset(inventory.whole) for inventory in given.inventories}
    adopted = tuple(slot for slot in ownership.grid.slots() if slot not in whole[ownership.owner(*slot)])
    is_lost = [ownership.grid.fsdp or not _stands_for(slot, whole[ownership.owner(*slot)]) for slot in adopted]
    lost = tuple(sorted({slot[1] for slot, gone in zip(adopted, is_lost, strict=True) if gone}))
    if lost:
        return _digested(Plan(step, {}, (), lost, ""))
    done, hands, held = _done(given), _hands(given), held_at_start(given)
    there = held_after(held, hands)
    tasks = tasks_left(ownership, there, done)
    compute = list_schedule(tasks, ownership, first=frozenset(replayed(tasks, shown_by(there))))
    members = {worker: compute.get(worker, ()) for worker in whole}
    members = with_whole_stages(members, ownership) if ownership.grid.fsdp else members
    sent = with_hands(with_transfers(members, ownership, held), hands, ownership)
    program = with_end_of_step(sent, ownership, held, healing_in(given))
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


def _hands(given: PlanInput) -> tuple[Hand, ...]:
    return hands_in(given.ownership, given.committed + 1, given.inventories, _done(given))


def _stands_for(slot: Slot, whole: Collection[Slot]) -> bool:
    return any(stage == slot[1] for _, stage in whole)


def _done(given: PlanInput) -> frozenset[Slot]:
    """Returns the slots whose owner holds the inputs of the optimizer step; of tied stages all slots or none."""
    ownership, grid = given.ownership, given.ownership.grid
    logged = {each.worker: frozenset(each.logged) for each in given.inventories if each.step == given.committed + 1}
    whole_stages = {
        stage
        for stage in range(grid.stages)
        if all((d, stage) in logged.get(ownership.owner(d, stage), ()) for d in range(grid.pipelines))
    }
    return frozenset(slot for slot in grid.slots() if all(each in whole_stages for each in _group(slot[1], grid)))


def _group(stage: int, grid: Grid) -> list[int]:
    """Returns `stage` and the stages that share a parameter with it, directly or over other stages."""
    group = [stage]
    for each in group:  # it grows while it is walked
        group += [other for other in grid.tied_to(each) if other not in group]
    return group


def healing_in(given: PlanInput) -> frozenset[tuple[int, Slot]]:
    """Returns the shadows, as (worker, slot), that get the state of their slot during the plan."""
    whole = {inventory.worker: inventory.whole for inventory in given.inventories}
    shadows = [(worker, slot) for slot in given.ownership.grid.slots() for worker in given.ownership.shadows_of(*slot)]
    return frozenset((worker, slot) for worker, slot in shadows if slot not in whole[worker])


def held_at_start(given: PlanInput) -> tuple[Held, ...]:
    """Returns the values that workers hold when the plan begins; of a counter the last index only."""
    return tuple(_held(given, _done(given)))


def _held(given: PlanInput, done: Collection[Slot]) -> Iterator[Held]:
    ownership = given.ownership
    for inventory in given.inventories:
        if inventory.step == given.committed:
            continue  # it first takes the committed optimizer step, which drops all its values
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
    for hand in _hands(given):
        yield hand.giver, Value(Kind.ADDED, *hand.slot, hand.added - 1)


def _digested(plan: Plan) -> Plan:
    lines = [
        f"step {plan.step}",
        f"adopted {plan.adopted}",
        f"lost {plan.lost_stages}",
        *(f"{worker} {' '.join(map(str, actions))}" for worker, actions in plan.program.items()),
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Plan(plan.step, plan.program, plan.adopted, plan.lost_stages, digest)
