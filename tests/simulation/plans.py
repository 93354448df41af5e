"""The programs and plans of the shipped code for the simulated workers, made once for equal inputs.

They are pure functions, so a million schedules share the results. The oracle checks each new plan, and the engine's
verification too. Some plans are made again from inventories in another order, which must not change them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from engine.core.ownership import Grid, Ownership, Redundancy, Slot, healed
from engine.core.program.build import baseline, build_program
from engine.core.program.handoff import Ship
from engine.core.program.inventory import Inventory, PlanMessage, ProgramRest, from_json
from engine.core.program.planner import EpochPlan, PlanInput, make_plan
from engine.core.protocol.plan_orders import repair_at_boundary
from engine.core.protocol.worker_inputs import plan_epoch
from tests.simulation.case import Violation
from tests.simulation.compiled import Compiled, compiled
from tests.simulation.oracle import check_plan


class Planned(NamedTuple):
    """A plan, and its program in the form for the simulated workers."""

    plan: EpochPlan
    shares: dict[int, Compiled]
    rests: frozenset[ProgramRest] = frozenset()  # if it is a repair


@lru_cache(maxsize=4096)
def next_program(
    schedule: str,
    ownership: Ownership,
    redundancy: Redundancy,
    level: int,
    log_every: int,
    members: tuple[int, ...],
    leaving: tuple[int, ...],
    wanted: tuple[int, ...],
    hosts: tuple[int, ...],
    copy_time: float,
) -> tuple[Ownership, bool, dict[int, Compiled]]:
    """Returns the ownership after a step of a recovery, whether it heals, and each worker's share of its program."""
    after = healed(ownership, redundancy, level, members, leaving, wanted, hosts)
    new = [
        (worker, slot)
        for slot in ownership.grid.slots()
        for worker in after.shadows_of(*slot)
        if worker not in ownership.replicas(*slot)
    ]
    return after, bool(new), shares_of(schedule, after, redundancy, frozenset(new), log_every, copy_time)


@lru_cache(maxsize=4096)
def shares_of(
    schedule: str,
    ownership: Ownership,
    redundancy: Redundancy,
    healing: frozenset[tuple[int, Slot]],
    log_every: int,
    copy_time: float,
) -> dict[int, Compiled]:
    """Returns each worker's share of the program of a whole step."""
    program = build_program(schedule, ownership, redundancy, healing, log_every, None, copy_time or None)
    return compiled(program, ownership)


@lru_cache(maxsize=4096)
def read(text: str) -> Inventory:
    """Returns the inventory in a text."""
    return from_json(text)


@lru_cache(maxsize=4096)
def planned(grid: Grid, schedule: str, told: PlanMessage, *, is_checked: bool = True) -> Planned:
    """Returns the plan of a document; the oracle and the engine's verification check it, unless that takes too long."""
    made, schedule = plan_epoch(grid, schedule, told), told.schedule or schedule
    inventories = tuple(read(text) for _, text in told.inventories)
    ships = tuple(Ship(*each) for each in told.ships)
    given = PlanInput(told.epoch, told.committed, made.ownership, inventories, ships)
    if is_checked:
        check_plan(given, made.plan)
    if is_checked and crc32(repr(told.inventories).encode()) % 16 == 0:  # the same ones in every process
        turned = tuple(_turned(each) for each in inventories)
        base = baseline(schedule, grid, told.before) if made.plan.repair else None
        again = replace(given, inventories=turned)
        repair = repair_at_boundary(again) if made.plan.repair and base is None else None
        remade = replace(made.plan, repair=repair) if repair else make_plan(again, base)
        if replace(remade, digest=made.plan.digest) != made.plan:
            raise Violation("the order of what is held changes the plan")
    if made.plan.lost_stages:
        return Planned(made, {})
    rests = frozenset(made.plan.repair.rests if made.plan.repair else ())
    return Planned(made, compiled(made.plan.program, made.ownership), rests)


def followed(grid: Grid, schedule: str, told: PlanMessage, whole: Planned, worker: int) -> EpochPlan:
    """Returns the plan of a worker that was told a part, which must be its part of the whole plan.

    How its peers go on is compared by what the part says of them, unless a step of theirs ends in another way.
    """
    mine = plan_epoch(grid, schedule, told)
    own, those = mine.plan.program, whole.plan.plan.program
    repairs = [repair for made in (mine, whole.plan) if (repair := made.plan.repair)]
    is_told_alike = len(repairs) == 2 and whole.rests.issuperset(repairs[0].rests)
    has_ends = any(repair.done or repair.logged or repair.healing for repair in repairs)
    compared = (worker,) if is_told_alike and not has_ends else own
    if mine.ownership != whole.plan.ownership or any(own[each] != those[each] for each in compared):
        raise Violation(f"worker {worker} is told another part than that of the plan")
    return mine


def forget() -> None:
    """Drops all kept results; call it after a change of the engine under test."""
    for each in (next_program, shares_of, planned, read):
        each.cache_clear()


def _turned(inventory: Inventory) -> Inventory:
    """Returns an equal inventory whose mappings were filled the other way round."""
    counted, added = (dict(reversed(list(each.items()))) for each in (inventory.counted, inventory.added))
    return replace(inventory, counted=counted, added=added)
