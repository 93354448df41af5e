"""A rule of the membership protocol: the transition for an event, which a cell of the table names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.core.membership.state import Phase, State


@dataclass(frozen=True, slots=True)
class Rule:
    """The transition for an event, and the phases to which it may lead, beside the present one."""

    decide: Callable[[State, Any], State]
    leads_to: tuple[Phase, ...]


def rule(*leads_to: Phase) -> Callable[[Callable[[State, Any], State]], Rule]:
    """Decorates a transition as a `Rule`."""
    return lambda decide: Rule(decide, leads_to)
