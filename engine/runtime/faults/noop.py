"""Nothing: what a fault costs that does nothing, and whether its moment comes."""

from __future__ import annotations

from engine.runtime.faults.registry import Scene, at_once, fault_kind


@fault_kind("noop", "Nothing is done; the moment is recorded.", "worker", at_once)
def noop(scene: Scene) -> None:
    """Says that the moment has come."""
    scene.tell("nothing was done")
