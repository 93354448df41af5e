"""The programs and plans of the shipped code for the simulated workers, made once for equal inputs.

They are pure functions, so a million schedules share the results. The oracle checks each new plan, and the engine's
verification too. Some plans are made again from inventories in another order, which must not change them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from engine.core.ownership import Ownership, Redundancy, Slot, with_shadows
from engine.core.program.build import build_program
from engine.core.recovery.inventory import Inventory, from_json
from engine.core.recovery.plan import Plan
from engine.core.recovery.planner import PlanInput, make_plan
from tests.simulation.case import Violation
from tests.simulation.compiled import Compiled, compiled
from tests.simulation.oracle import check_plan


class Document(NamedTuple):
    """The inputs of a plan, for every member; `clip` and `loss` are of the last commit."""

    epoch: int
    committed: int
    ownership: Ownership
    members: tuple[int, ...]
    leaving: tuple[int, ...]
    inventories: tuple[tuple[int, str], ...]
    clip: float


class Planned(NamedTuple):
    """A plan in the form for the simulated workers."""

    plan: Plan
    shares: dict[int, Compiled]


@lru_cache(maxsize=4096)
def next_program(
    schedule: str,
    ownership: Ownership,
    redundancy: Redundancy,
    level: int,
    log_every: int,
    members: tuple[int, ...],
    leaving: tuple[int, ...],
) -> tuple[Ownership, dict[int, Compiled]]:
    """Returns the healed ownership after a commit, and each worker's share of its program."""
    healed = with_shadows(ownership, redundancy, level, members, leaving)
    new = [
        (worker, slot)
        for slot in ownership.grid.slots()
        for worker in healed.shadows_of(*slot)
        if worker not in ownership.replicas(*slot)
    ]
    return healed, shares_of(schedule, healed, redundancy, frozenset(new), log_every)


@lru_cache(maxsize=4096)
def shares_of(
    schedule: str, ownership: Ownership, redundancy: Redundancy, healing: frozenset[tuple[int, Slot]], log_every: int
) -> dict[int, Compiled]:
    """Returns each worker's share of the program of a whole step."""
    return compiled(build_program(schedule, ownership, redundancy, healing, log_every), ownership)


@lru_cache(maxsize=4096)
def read(text: str) -> Inventory:
    """Returns the inventory in a text."""
    return from_json(text)


def given_by(document: Document) -> PlanInput:
    """Returns the input of the planner."""
    inventories = tuple(read(text) for _, text in document.inventories)
    return PlanInput(document.epoch, document.committed, document.ownership, inventories)


@lru_cache(maxsize=4096)
def planned(document: Document) -> Planned:
    """Returns the plan of a document."""
    given = given_by(document)
    plan = make_plan(given)
    check_plan(given, plan)
    if hash(document.inventories) % 16 == 0:
        turned = tuple(_turned(each) for each in given.inventories)
        if make_plan(replace(given, inventories=turned)) != plan:
            raise Violation("the order of what is held changes the plan")
    if plan.lost_stages:
        return Planned(plan, {})
    return Planned(plan, compiled(plan.program, document.ownership))


def forget() -> None:
    """Drops all kept results; call it after a change of the engine under test."""
    for each in (next_program, shares_of, planned, read):
        each.cache_clear()


def _turned(inventory: Inventory) -> Inventory:
    """Returns an equal inventory whose mappings were filled the other way round."""
    return Inventory(
        inventory.worker,
        inventory.step,
        inventory.whole,
        dict(reversed(list(inventory.counted.items()))),
        dict(reversed(list(inventory.added.items()))),
        inventory.logged,
        inventory.values,
    )
