"""No operation: a fault without an effect, to measure the cost of injection and to test that its moment comes."""

from __future__ import annotations

from engine.runtime.faults.registry import at_once, fault_kind
from engine.runtime.faults.scene import Scene


@fault_kind("noop", "Nothing is done; the moment is recorded.", "worker", at_once)
def noop(scene: Scene) -> None:
    """Confirms that the moment has come."""
    scene.tell("nothing was done")
