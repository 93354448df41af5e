"""The plan of a recovery, and the plan of an epoch with the document that it follows from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.core.action import Program
from engine.core.ownership import Ownership, Slot
from engine.core.recovery.plan_messages import PlanMessage


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of all members to finish the step. Owners build `adopted` slots from a replica of another pipeline."""

    step: int
    program: Program
    adopted: tuple[Slot, ...]
    lost_stages: tuple[int, ...]  # stages without a whole replica at an owner: the step cannot be finished
    digest: str  # SHA-256 over all of it, the same on every member


class EpochPlan(NamedTuple):
    """The document of an epoch, with the ownership and the plan that follow from it."""

    told: PlanMessage
    ownership: Ownership
    plan: Plan
