"""One case, one history."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.errors import BambooError
from engine.core.protocol.state import Phase
from tests.simulation.beginning import begun
from tests.simulation.case import Case, Fault, Violation
from tests.simulation.host_world import HostWorld
from tests.simulation.sleeping import SleepWorld
from tests.simulation.world import World


@dataclass(frozen=True, slots=True)
class History:
    """The history of a case; `problem` is empty if every promise was kept. `moments` has a count for each worker."""

    case: Case
    problem: str
    trace: int
    moments: tuple[int, ...]
    struck: tuple[Fault, ...]
    phase: Phase
    epoch: int
    turns: frozenset[str]
    reached: int  # moments of the last coordinator


def run(case: Case, tell: Callable[[str], None] | None = None) -> History:
    """Returns the history of a case."""
    return history_of(_world_of(case)(case, tell))


def run_on(case: Case) -> History:
    """Returns the same history sooner: cases of one shape share their start."""
    return history_of(_world_of(case)(case) if case.hosts or case.sleeps else begun(case, World))


def _world_of(case: Case) -> type[World]:
    return HostWorld if case.hosts else SleepWorld if case.sleeps else World


def history_of(world: World) -> History:
    """Runs a world to its end, and returns its history."""
    was_on = gc.isenabled()
    gc.disable()  # nearly all of a world lives until its end: a look at it meanwhile finds nothing
    problem = ""
    try:
        world.run()
        world.judge.end()
    except (Violation, BambooError) as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        if was_on:
            gc.enable()
    state = world.membership
    moments = tuple(worker.moments for worker in world.workers)
    return History(
        world.case,
        problem,
        world.trace,
        moments,
        tuple(world.struck),
        state.phase,
        state.epoch,
        frozenset(world.turns),
        world.reached,
    )
