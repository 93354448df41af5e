"""No operation: a fault without an effect, to measure the cost of injection and to test that its moment comes."""

from __future__ import annotations

from engine.core.faults.fault_kind import at_once
from engine.runtime.faults.registry import WorkerFaultContext, fault_kind


@fault_kind("noop", "Nothing is done; the moment is recorded.", "worker", at_once)
def noop(context: WorkerFaultContext) -> None:
    """Confirms that the moment has come."""
    context.tell("nothing was done")
