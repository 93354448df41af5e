"""The common start of jobs of one shape: a world at the begin of its first epoch, of which each case gets a copy.

The start is the same in every case whose first fault comes after it and whose delays are the usual ones.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from tests.simulation.case import Case, Fault
from tests.simulation.compiled import Compiled
from tests.simulation.provenance import Reference
from tests.simulation.world import World

MOMENTS = 3  # of a worker before it has joined
_POINTS = frozenset({"welcome", "partition", "ready", "waiting"})
_LOST_HOST = Fault(0, "never", kind="zombie")  # it strikes nobody; a world with it has a host for each worker


W = TypeVar("W", bound=World)


def begun(case: Case, world_of: type[W], *, once: bool = False) -> W:
    """Returns the world of a case, already at its first epoch if the start of the shape is that of the case.

    With `once` that is no copy: a process may do so for one case of a shape, and then ends.
    """
    is_early = any(fault.point in _POINTS or (fault.point == "moment" and fault.at <= MOMENTS) for fault in case.faults)
    if case.spread or case.deaths or is_early:
        return world_of(case)
    start = replace(case, seed=0, faults=(_LOST_HOST,) if case.loses_a_host else ())
    make: Callable[[Case], World] = world_of
    first, copy = _beginning(start, make)
    world: Any = first if once else copy()
    world.takes(case)
    return world


@lru_cache(maxsize=64)
def _beginning(case: Case, world_of: Callable[[Case], World]) -> tuple[World, Callable[[], Any]]:
    """Returns a world at the begin of the first epoch, and a function that copies it, but not what never changes."""
    world = world_of(case)
    world.run(until_begun=True)
    written = io.BytesIO()
    pickler = _Pickler(written)
    pickler.dump(world)
    text, shared = written.getvalue(), pickler.shared

    def copy() -> Any:
        reader = _Unpickler(io.BytesIO(text))
        reader.shared = shared
        return reader.load()

    return world, copy


class _Pickler(pickle.Pickler):
    """Leaves out the values of the machines, and all else that is never modified."""

    def __init__(self, written: io.BytesIO):
        super().__init__(written, protocol=5)
        self.shared: list[Any] = []

    def persistent_id(self, each: Any) -> int | None:
        if not type(each).__module__.startswith("engine.") and not isinstance(each, Case | Compiled | Reference):
            return None
        self.shared.append(each)
        return len(self.shared) - 1


class _Unpickler(pickle.Unpickler):
    shared: list[Any]

    def persistent_load(self, place: int) -> Any:
        return self.shared[place]
