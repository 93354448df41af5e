"""What the simulated workers run: the programs and plans of the shipped code, made once for the same question.

The answers are pure, so a million schedules share them. A plan is checked by the oracle and verified when it is made,
and every now and then made again from inventories written in another order, which may change nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from engine.core.ownership import Ownership, Redundancy, Slot, with_shadows
from engine.core.program.build import build_program
from engine.core.recovery.inventory import Inventory, from_json
from engine.core.recovery.planner import Plan, PlanInput, make_plan
from tests.simulation.case import Violation
from tests.simulation.compiled import Compiled, compiled
from tests.simulation.oracle import check_plan


class Document(NamedTuple):
    """What every member is told to make its plan from; `clip` and `loss` are of the last commit."""

    epoch: int
    committed: int
    ownership: Ownership
    members: tuple[int, ...]
    leaving: tuple[int, ...]
    inventories: tuple[tuple[int, str], ...]
    clip: float


class Planned(NamedTuple):
    """A plan, in the form in which workers run it."""

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
    """Returns the ownership after a commit, healed, and everybody's share of its program."""
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
    """Returns everybody's share of the program of a whole step."""
    return compiled(build_program(schedule, ownership, redundancy, healing, log_every), ownership)


@lru_cache(maxsize=4096)
def read(text: str) -> Inventory:
    """Returns the inventory that a text holds."""
    return from_json(text)


def given_by(document: Document) -> PlanInput:
    """Returns what the planner is asked."""
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
    """Makes every answer afresh; whoever changes the engine under test calls this."""
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
