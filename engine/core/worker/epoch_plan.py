"""Makes the plan of an epoch from its document; all members make the same."""

from __future__ import annotations

from engine.core.ownership import Grid, Ownership
from engine.core.recovery.inventory import from_json
from engine.core.recovery.plan import EpochPlan
from engine.core.recovery.plan_messages import PlanMessage
from engine.core.recovery.planner import PlanInput, make_plan


def plan_epoch(grid: Grid, told: PlanMessage) -> EpochPlan:
    """Returns the plan that follows from a document; raises InvariantError if the document is impossible."""
    ownership = Ownership(grid, told.owners, told.shadows)
    inventories = tuple(from_json(text) for _, text in told.inventories)
    return EpochPlan(told, ownership, make_plan(PlanInput(told.epoch, told.committed, ownership, inventories)))
