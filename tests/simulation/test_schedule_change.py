"""The schedule changes while the run goes on, among deaths of workers and coordinators; and planted bugs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.program import build
from engine.core.program.inventory import PlanMessage
from engine.core.program.owners import owners_compute, owners_program
from engine.core.protocol import worker_inputs
from engine.core.protocol.state import Phase
from engine.core.protocol.worker_inputs import plan_epoch
from tests.simulation import plans
from tests.simulation.case import MOVE, USE, Case, Fault
from tests.simulation.judge import MOVED
from tests.simulation.planting import all_well, caught
from tests.simulation.run import run
from tests.simulation.schedules import changing_case
from tests.simulation.world import World

HISTORIES = 40
USED = "another schedule is in use"
THERE = Fault(0, "moment", 8, USE, 1)
BACK = Fault(0, "moment", 60, USE, 0)
PLAIN = Case(3, 3, steps=6, faults=(THERE, BACK))
CASES = (
    PLAIN,
    Case(4, 2, stages_per_worker=2, schedule="interleaved", steps=8, faults=(THERE, replace(BACK, at=90))),
    Case(2, 3, 2, "reroute", log_every=1, steps=5, faults=(THERE, BACK)),
    Case(2, 2, 2, fsdp=1, steps=5, faults=(THERE,)),
)


def ended(case: Case) -> World:
    world = World(case)
    world.run()
    world.judge.end()
    assert world.membership.phase is Phase.FINISHED
    return world


def test_a_change_costs_an_epoch_and_no_work() -> None:
    world = ended(replace(PLAIN, redundancy="none", faults=(THERE,)))
    assert (world.membership.epoch, world.membership.schedule) == (2, "zb1p")
    assert world.turns == {USED, "prepared hand-over is taken"}


def test_another_placement_moves_slots_there_and_back() -> None:
    there = replace(CASES[1], faults=(THERE,))
    assert (ended(there).membership.schedule, ended(there).membership.owners) == ("zbv", (0, 1, 1, 0))
    assert (ended(CASES[1]).membership.schedule, ended(CASES[1]).membership.owners) == ("", (0, 1, 0, 1))


def kills(case: Case, stride: int) -> Iterator[Case]:
    """Yields deaths of each worker from before the first boundary to behind the last one, and of the coordinator."""
    usual = run(case)
    assert (usual.problem, USED in usual.turns) == ("", True)
    for worker, count in enumerate(usual.moments):
        for at in range(3 + worker, count + 1, stride):
            yield replace(case, seed=at % 4, spread=at % 3, faults=(*case.faults, Fault(worker, "moment", at)))
    for at in range(1, usual.reached + 1, stride):
        yield replace(case, seed=at % 4, spread=at % 2, deaths=(at,))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.schedule}-{case.redundancy}-{case.fsdp}")
def test_a_death_at_any_moment_around_both_boundaries(case: Case) -> None:
    histories = all_well(kills(case, 41))
    assert sum(each.phase is Phase.FINISHED for each in histories) > len(histories) * 0.9


def test_changes_among_moves_deaths_notices_and_take_overs() -> None:
    histories = all_well(changing_case(number) for number in range(HISTORIES))
    assert sum(USED in each.turns for each in histories) > HISTORIES * 0.2


@pytest.mark.soak
def test_changes_in_many_histories() -> None:
    all_well(changing_case(number) for number in range(HISTORIES, 12_000))


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.schedule}-{case.redundancy}-{case.fsdp}")
def test_a_death_at_every_moment(case: Case) -> None:
    all_well(kills(case, 1))


# Blocks move first, and then the schedule changes: it orders the runs that the workers have by then.


def moved_first() -> Case:
    """Returns a case in which workers get runs of unlike numbers of blocks, and then another schedule."""
    case = Case(6, 3, blocks=2, steps=8)
    world = World(case)
    moves = (number for number in range(1, 5000) if number % 5)
    unlike = next(number for number in moves if is_ordered(world, world.wanted(number)))
    return replace(case, faults=(Fault(0, "moment", 8, MOVE, unlike), Fault(0, "moment", 120, USE, 1)))


def is_ordered(world: World, owners: tuple[int, ...]) -> bool:
    start = world.ownership
    return owners != start.owners and owners_compute("zb1p", start.grid, owners).is_scheduled


def test_a_changed_schedule_orders_the_runs_of_blocks_that_have_moved() -> None:
    case = moved_first()
    world = ended(case)
    assert {USED, MOVED} <= world.turns
    assert (world.membership.schedule, is_ordered(world, world.membership.owners)) == ("zb1p", True)
    all_well(kills(case, 23))


def test_a_changed_schedule_that_orders_the_blocks_of_the_old_owners_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = moved_first()
    cases, old = [case, *kills(case, 23)], World(case).ownership.owners
    for name, right in (("owners_compute", owners_compute), ("owners_program", owners_program)):

        def wrong(schedule: str, grid: Any, owners: Any, made: Any = right) -> Any:
            return made(schedule, grid, old if schedule == "zb1p" else owners)

        monkeypatch.setattr(build, name, wrong)
    caught_in(cases, "")


def test_a_repair_of_a_changed_schedule_by_the_old_owners_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owners run the blocks that they have by then, and after a death continue as if none had moved."""
    case = moved_first()
    cases, old = [*kills(case, 7)], World(case).ownership.owners

    def wrong(schedule: str, grid: Any, owners: Any) -> Any:
        return owners_program(schedule, grid, old if schedule == "zb1p" else owners)

    monkeypatch.setattr(worker_inputs, "owners_program", wrong)
    caught_in(cases, "the plan")


def caught_in(cases: list[Case], words: str) -> None:
    plans.forget()
    try:
        caught(cases, words)
    finally:
        plans.forget()


def test_a_worker_that_repairs_the_schedule_of_the_job_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(grid: Any, schedule: str, told: PlanMessage) -> Any:
        return plan_epoch(grid, schedule, replace(told, schedule=""))._replace(document=told)

    monkeypatch.setattr(plans, "plan_epoch", wrong)
    caught_in(list(kills(replace(PLAIN, faults=(THERE,)), 3)), "")
