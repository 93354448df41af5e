"""The schedule changes while the run goes on, among deaths of workers and coordinators; and a planted bug."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.program.inventory import PlanMessage
from engine.core.protocol.state import Phase
from engine.core.protocol.worker_inputs import plan_epoch
from tests.simulation import plans
from tests.simulation.case import USE, Case, Fault
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


def test_a_worker_that_repairs_the_schedule_of_the_job_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(grid: Any, schedule: str, told: PlanMessage) -> Any:
        return plan_epoch(grid, schedule, replace(told, schedule=""))._replace(document=told)

    cases = list(kills(replace(PLAIN, faults=(THERE,)), 3))
    plans.forget()
    monkeypatch.setattr(plans, "plan_epoch", wrong)
    try:
        caught(cases, "")
    finally:
        plans.forget()
