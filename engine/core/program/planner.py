"""The recovery planner: from the inventories of the survivors to a program for the rest of the step.

It walks backwards from the values that are missing: the gradient of every slot at its owner. A value that a live worker
holds is sent, an accumulator too; any other value is recomputed, recursively. A backward that has been
added is redone for its input gradient only, and a forward that its owner has counted is redone without an update. So no
microbatch counts twice. The planner has no special case for the first or the last stage. A failure during recovery
needs none either: the planner runs again, on new inventories.

    inventories -> tasks that are left -> order on each worker, replay first -> transfers -> end of the step

Inventories decide, not the ownership: a replica counts if it is whole. The LOGGED values of a group of tied stages
count only if the owners of all slots of the group hold them; else the accumulators go on from their counters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from engine.core.action import RECEIVE_OPS, Program
from engine.core.errors import InvariantError
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.dependencies import carried
from engine.core.program.dry_run import refuse_stuck
from engine.core.program.handoff import Hand, Ship, held_after, held_with, with_hands
from engine.core.program.inventory import Inventory, PlanMessage, Repair
from engine.core.program.passes import with_end, with_end_of_step, with_transfers, with_whole_stages
from engine.core.program.plan_repair import Baseline, RepairedProgram, repaired
from engine.core.program.remaining_tasks import list_schedule, replayed, shown_by, tasks_left
from engine.core.value import WIRE, Held, Kind, Value


# The plan of a recovery, and the plan of an epoch with the document that it follows from.
@dataclass(frozen=True, slots=True)
class Plan:
    """The work of all members to finish the step. Owners build `adopted` slots from a replica of another pipeline."""

    step: int
    program: Program
    adopted: tuple[Slot, ...]
    lost_stages: tuple[int, ...]  # stages without a whole replica at an owner: the step cannot be finished
    digest: str  # SHA-256 over all of it, the same on every member
    repair: Repair | None = None  # then values go between the peers of a whole step only


class EpochPlan(NamedTuple):
    """The document of an epoch, with the ownership and the plan that follow from it."""

    document: PlanMessage
    ownership: Ownership
    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The document from which every member makes the plan of step ``committed + 1``."""

    epoch: int
    committed: int
    ownership: Ownership  # after the verdict: heirs are owners, surviving replicas are shadows
    inventories: tuple[Inventory, ...]  # of every member, by worker
    ships: tuple[Ship, ...] = ()  # the residuals that are sent


def make_plan(source: PlanInput, base: Baseline | None = None) -> Plan:
    """Returns the plan, a repair of `base` if possible; it cannot deadlock. Raises InvariantError for bad input."""
    ownership, step = source.ownership, source.committed + 1
    if base is not None and (repair := repair_of(source, base)) is not None:
        return plan_of(repair, base.program, ownership, step)
    adopted, lost = adopted_and_lost(source)
    return _digested(Plan(step, {}, (), lost, "")) if lost else replanned(source, adopted)


def repair_of(source: PlanInput, base: Baseline) -> Repair | None:
    """Returns the repair of `base`, the program with which the step began; None if the step has to be planned.

    Raises InvariantError if the input is impossible, ScheduleError if a successor would wait for itself.
    """
    (adopted, lost), done, ownership = adopted_and_lost(source), _done(source), source.ownership
    if lost or source.ships or _hands(source, done):
        return None
    rests = repaired(base, ownership, source.committed + 1, source.inventories, done)
    if rests is None:
        return None
    program = RepairedProgram(rests, base.program, lambda worker, actions: actions)
    held = {inventory.worker: inventory for inventory in source.inventories}
    for rest in rests:
        if rest.rewritten is not None:
            actions = program[rest.worker]
            taken = ((WIRE, carried(action)) for action in actions if action.op in RECEIVE_OPS)
            refuse_stuck({rest.worker: actions}, ownership, (*_held_by(held[rest.worker], source), *taken))
    return Repair(rests, adopted, tuple(sorted(done)), _logged(source, done), tuple(sorted(healing_in(source))))


def adopted_and_lost(source: PlanInput) -> tuple[tuple[Slot, ...], tuple[int, ...]]:
    """Returns the slots that their owners build from a replica of another pipeline, and the stages that are lost."""
    refuse_impossible(source)
    ownership = source.ownership
    whole = {inventory.worker: frozenset(inventory.whole) for inventory in source.inventories}
    adopted = tuple(slot for slot in ownership.grid.slots() if slot not in whole[ownership.owner(*slot)])
    replacements = {slot: {stage for _, stage in whole[ownership.owner(*slot)]} for slot in adopted}
    lost = {slot[1] for slot, stages in replacements.items() if ownership.grid.fsdp or slot[1] not in stages}
    return adopted, tuple(sorted(lost))


def replanned(source: PlanInput, adopted: tuple[Slot, ...]) -> Plan:
    """Returns the plan made from scratch, from what workers hold alone; its program has passed a dry run."""
    ownership, step, done = source.ownership, source.committed + 1, _done(source)
    hands, held = _hands(source, done), held_at_start(source)
    there = held_with(source.ships, held_after(held, hands), ownership)
    tasks = tasks_left(ownership, there, done)
    compute = list_schedule(tasks, ownership, first=frozenset(replayed(tasks, shown_by(there))))
    members = {inventory.worker: compute.get(inventory.worker, ()) for inventory in source.inventories}
    members = with_whole_stages(members, ownership) if ownership.grid.fsdp else members
    sent = with_hands(with_transfers(members, ownership, held), hands, ownership, source.ships)
    program = with_end_of_step(sent, ownership, held, healing_in(source))
    refuse_stuck(program, ownership, held)
    return _digested(Plan(step, program, adopted, (), ""))


def plan_of(repair: Repair, program: Program, ownership: Ownership, step: int, change: str = "") -> Plan:
    """Returns the plan that a repair is; `program` has the compute actions and transfers of the step as it began.

    `change`, what its coordinator sent, decides the digest if the repair is the part of one member.
    """
    there = frozenset(_ends(ownership, repair.done, repair.logged))
    end = partial(with_end, ownership=ownership, there=there, healing=frozenset(repair.healing))
    plan = Plan(step, RepairedProgram(repair.rests, program, end), repair.adopted, (), "", repair)
    return _digested(plan, (change or repr((ownership, repair)),))


def refuse_impossible(source: PlanInput) -> None:
    """Raises InvariantError if the input is impossible, before anything walks its inventories."""
    grid, members = source.ownership.grid, [inventory.worker for inventory in source.inventories]
    if members != sorted(set(members)):
        raise InvariantError(f"expected one inventory of each member, in order, found {members}")
    absent = [worker for worker in source.ownership.workers() if worker not in members]
    if absent:
        raise InvariantError(f"workers {absent} own or shadow a slot, and there is no inventory of them")
    for inventory in source.inventories:
        if inventory.step - source.committed not in (0, 1):
            raise InvariantError(
                f"worker {inventory.worker} is at step {inventory.step} while {source.committed} is the last committed"
            )
        counts = (*inventory.counted.values(), *inventory.added.values())
        if not all(0 <= count <= grid.microbatches for count in counts):
            raise InvariantError(f"worker {inventory.worker} has taken in more than {grid.microbatches} microbatches")
        runs = [(pipeline, stage, last) for _, pipeline, stage, of in inventory.values.lines() for _, last in of]
        slots = (*inventory.whole, *inventory.logged, *inventory.counted, *inventory.added, *inventory.saved)
        offers = [(*slot, saved.first + len(saved.sizes) - 1) for slot, saved in inventory.saved.items()]
        if not all(grid.has(*each) for each in (*slots, *runs, *offers)):
            raise InvariantError(f"worker {inventory.worker} holds what no step of {grid} has")


def _hands(source: PlanInput, done: Collection[Slot]) -> tuple[Hand, ...]:
    """Returns the accumulators to hand off, by slot; none for slots that are `done`."""
    ownership = source.ownership
    most: dict[Slot, tuple[int, int]] = {}  # backwards added, and the worker, negated: the lowest of several
    owned: dict[Slot, int] = {}
    for held in source.inventories:
        for slot, added in held.added.items() if held.step == source.committed + 1 else ():
            if slot in held.whole:
                most[slot] = max(most.get(slot, (0, 0)), (added, -held.worker))
                if ownership.owner(*slot) == held.worker:
                    owned[slot] = added
    return tuple(
        Hand(-giver, ownership.owner(*slot), slot, added)
        for slot, (added, giver) in sorted(most.items())
        if slot not in done and added > owned.get(slot, 0)
    )


def _done(source: PlanInput) -> frozenset[Slot]:
    """Returns the slots whose owner holds the inputs of the optimizer step; of tied stages all slots or none."""
    ownership, grid = source.ownership, source.ownership.grid
    logged = {each.worker: frozenset(each.logged) for each in source.inventories if each.step == source.committed + 1}
    whole_stages = {
        stage
        for stage in range(grid.stages)
        if all((d, stage) in logged.get(ownership.owner(d, stage), ()) for d in range(grid.pipelines))
    }
    return frozenset(slot for slot in grid.slots() if all(each in whole_stages for each in _group(slot[1], grid)))


def ends_tied_stages_together(done: Collection[Slot], grid: Grid) -> bool:
    """Whether the slots that are done have no stage that shares a parameter with one that is not."""
    return all((pipeline, other) in done for pipeline, stage in done for other in grid.tied_to(stage))


def _group(stage: int, grid: Grid) -> list[int]:
    """Returns `stage` and the stages that share a parameter with it, directly or over other stages."""
    group = [stage]
    for member in group:  # it grows while it is walked
        group += [other for other in grid.tied_to(member) if other not in group]
    return group


def healing_in(source: PlanInput) -> frozenset[tuple[int, Slot]]:
    """Returns the shadows, as (worker, slot), that get the state of their slot during the plan."""
    ownership, whole = source.ownership, {inventory.worker: inventory.whole for inventory in source.inventories}
    shadows = [(worker, slot) for slot in ownership.grid.slots() for worker in ownership.shadows_of(*slot)]
    return frozenset((worker, slot) for worker, slot in shadows if slot not in whole[worker])


def held_at_start(source: PlanInput) -> tuple[Held, ...]:
    """Returns the values that workers hold when the plan begins; of a counter the last index only."""
    done = _done(source)
    values = [held for inventory in source.inventories for held in _held_by(inventory, source)]
    values += _ends(source.ownership, sorted(done), _logged(source, done))
    values += [(hand.giver, Value(Kind.ADDED, *hand.slot, hand.added - 1)) for hand in _hands(source, done)]
    return tuple(values)


def _logged(source: PlanInput, done: Collection[Slot]) -> tuple[tuple[int, Slot], ...]:
    """Returns the shadows that hold the inputs of the optimizer step of slots that are done."""
    logged = {each.worker: each.logged for each in source.inventories if each.step == source.committed + 1}
    shadows = ((worker, slot) for slot in sorted(done) for worker in source.ownership.shadows_of(*slot))
    return tuple((worker, slot) for worker, slot in shadows if slot in logged.get(worker, ()))


def _ends(ownership: Ownership, done: Iterable[Slot], logged: Iterable[tuple[int, Slot]]) -> Iterator[Held]:
    """Yields the inputs of the optimizer step that owners and shadows hold of the slots that are done."""
    for slot in done:
        owner, reduced = ownership.owner(*slot), Value(Kind.REDUCED, *slot)
        yield from ((owner, reduced), (WIRE, reduced), (owner, Value(Kind.LOGGED, *slot)))
    yield from ((worker, Value(Kind.LOGGED, *slot)) for worker, slot in logged)


def _held_by(inventory: Inventory, source: PlanInput) -> Iterator[Held]:
    """Yields what a worker of the open step holds: its values, and the counters of the slots that it owns."""
    if inventory.step == source.committed:
        return
    worker = inventory.worker
    yield from ((worker, value) for value in inventory.values)
    for slot in source.ownership.slots_of(worker):
        if slot in inventory.whole:
            for kind, counts in ((Kind.COUNTED, inventory.counted), (Kind.ADDED, inventory.added)):
                if counts.get(slot, 0):
                    yield worker, Value(kind, *slot, counts[slot] - 1)


def _digested(plan: Plan, program: Iterable[str] | None = None) -> Plan:
    """Returns the plan with its digest; `program` is the text that decides its program, or None for all of that."""
    if program is None:
        program = (f"{worker} {' '.join(map(str, actions))}" for worker, actions in plan.program.items())
    lines = (f"step {plan.step}", f"adopted {plan.adopted}", f"lost {plan.lost_stages}", *program)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return replace(plan, digest=digest)
