"""Programs of one step in a random order, made by executing them on the machine, action by action."""

from __future__ import annotations

import random
from collections.abc import Collection

from engine.core.action import Action, Op, Program
from engine.core.ownership import Grid, Ownership
from tests.core.machine import TRANSFERS, Machine, Replica, slot_of


def random_ownership(order: random.Random) -> Ownership:
    """Returns a small job in which anybody may own several slots, or shadow some."""
    grid = Grid(order.randint(1, 4), order.randint(1, 3), order.choice((1, 1, 1, 2)))
    if grid.stages > 1 and order.randrange(3) == 0:
        grid = Grid(
            *(grid.stages, grid.microbatches, grid.pipelines), (tuple(sorted(order.sample(range(grid.stages), 2))),)
        )
    num_slots = grid.pipelines * grid.stages
    owners = tuple(order.randrange(num_slots) for _ in range(num_slots))
    most = order.choice((0, 1, 2))
    others = [[worker for worker in range(num_slots + 1) if worker != owner] for owner in owners]
    shadows = tuple(tuple(order.sample(each, order.randint(0, min(most, len(each))))) for each in others)
    return Ownership(grid, owners, shadows)


def random_healing(ownership: Ownership, order: random.Random) -> list[Replica]:
    """Returns some of the shadows, as (worker, slot): those that get the state of their slot in the step."""
    every = [(worker, slot) for slot in ownership.grid.slots() for worker in ownership.shadows_of(*slot)]
    return order.sample(every, order.randint(0, len(every)))


def actions_of_step(ownership: Ownership, healing: Collection[Replica] = ()) -> dict[int, list[Action]]:
    """Returns all that each worker must do in a step, in no useful order."""
    grid = ownership.grid
    actions: dict[int, list[Action]] = {worker: [] for worker in ownership.workers()}
    for pipeline, stage in grid.slots():
        worker = ownership.owner(pipeline, stage)
        ops = [Op.F, Op.I, Op.W] if (pipeline + stage + grid.microbatches) % 3 == 0 else [Op.F, Op.B]
        for op, (_, to) in TRANSFERS.items():
            if 0 <= stage + to < grid.stages and ownership.owner(pipeline, stage + to) != worker:
                ops.append(op)
        actions[worker] += [Action(stage, op, each, pipeline) for op in ops for each in range(grid.microbatches)]
        if all(ownership.owner(sooner, stage) != worker for sooner in range(pipeline)):
            actions[worker].append(Action(stage, Op.REDUCE_GRAD, pipeline=pipeline))
        for replica in (worker, *ownership.shadows_of(pipeline, stage)):
            actions[replica] += [Action(stage, op, pipeline=pipeline) for op in (Op.LOG, Op.COMMIT, Op.STEP)]
        healed = [each for each, slot in healing if slot == (pipeline, stage)]
        for each in (*healed, worker) if healed else ():
            actions[each].append(Action(stage, Op.HEAL, pipeline=pipeline))
    return actions


def redundant_forwards(
    ownership: Ownership, healing: Collection[Replica], order: random.Random
) -> dict[int, list[Action]]:
    """Returns some forwards that shadows run because their input is at hand, from the first microbatch on."""
    drawn: dict[int, list[Action]] = {worker: [] for worker in ownership.workers()}
    for pipeline, stage in ownership.grid.slots():
        for worker in ownership.shadows_of(pipeline, stage):
            at_hand = stage == 0 or ownership.owner(pipeline, stage - 1) == worker
            if at_hand and (worker, (pipeline, stage)) not in healing:
                count = order.randint(0, ownership.grid.microbatches)
                drawn[worker] += [Action(stage, Op.F, microbatch, pipeline) for microbatch in range(count)]
    return drawn


def random_program(ownership: Ownership, order: random.Random, healing: Collection[Replica] = ()) -> Program:
    """Returns a program of one step whose order is drawn by `order`, made by executing it action by action."""
    machine = Machine(ownership, healing=healing)
    left = actions_of_step(ownership, healing)
    for worker, forwards in redundant_forwards(ownership, healing, order).items():
        left[worker] += forwards
    program: dict[int, list[Action]] = {worker: [] for worker in left}
    while any(left.values()):
        worker = order.choice([each for each in left if left[each]])
        # Each barrier is met by all at once: nobody adds anything between coming to it and leaving it.
        drawn = [each for each in order.sample(left[worker], len(left[worker])) if _in_time(each, left[worker])]
        action = next((a for a in drawn if _all_come(machine, a) or machine.state(worker, a) == "ready"), None)
        if action is None:
            continue
        together = [(worker, action)]
        if action.op is Op.REDUCE_GRAD:
            together = [
                (each, reduction)
                for each, actions in left.items()
                for reduction in actions
                if reduction.op is Op.REDUCE_GRAD and reduction.stage == action.stage
            ]
            machine.at_barrier[action.stage] = dict.fromkeys([each for each, _ in together], 0)
        for owner, each in together:
            machine.do(owner, each)
            program[owner].append(each)
            left[owner].remove(each)
    return {worker: tuple(actions) for worker, actions in program.items()}


def _in_time(action: Action, left: list[Action]) -> bool:
    """Says whether nothing is left at the worker that would be too late once the action has run."""
    others = {each.op for each in left if slot_of(each) == slot_of(action)}
    return action.op is not Op.LOG or others.isdisjoint({Op.F, Op.HEAL})


def _all_come(machine: Machine, action: Action) -> bool:
    if action.op is not Op.REDUCE_GRAD:
        return False
    every = [(pipeline, action.stage) for pipeline in range(machine.grid.pipelines)]
    return all(machine.added[slot] == machine.grid.microbatches for slot in every)
