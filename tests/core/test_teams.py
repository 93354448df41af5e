"""Unlike stages under every schedule: runs of blocks that it orders as its stages, and the policy that deals them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.core.ownership import Grid, Ownership, directions_of, fresh
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.core.program.owners import owners_compute, owners_program
from engine.core.program.schedules import SCHEDULES
from engine.core.program.teams import is_in_list_order, teams_of
from engine.core.program.verify import verify
from engine.core.protocol.assignment import ScheduleOrder, assign, dealt, step_time
from engine.core.protocol.measured_facts import MeasuredFacts
from tests.core import recovery_cases
from tests.core.recovery_cases import ANY_ORDER, assert_faultless, distinct_kills, seeded
from tests.core.test_unshard_pass import most_whole
from tests.looped import looped

NAMED = [name for name in SCHEDULES if not is_in_list_order(name, Grid(1, 1))]


def order_of(schedule: str) -> ScheduleOrder:
    """Returns the order of a schedule with two stages on each worker, or one where it takes no more."""
    return ScheduleOrder(schedule, 2 if SCHEDULES[schedule].takes(2) else 1)


def dealt_to(workers: int, grid: Grid, schedule: str) -> Ownership:
    """Returns the ownership of a grid that is dealt to some workers, the same in each pair of opposite directions."""
    order, ways = order_of(schedule), directions_of(schedule)
    owners: list[int] = []
    for first in range(0, workers * grid.pipelines // ways, workers):
        line = dealt(range(first, first + workers), order.stages_per_worker, grid, MeasuredFacts(), order)
        owners += [*line, *line[::-1]][: ways * grid.stages]
    return Ownership(grid, tuple(owners))


def length_of(ownership: Ownership, schedule: str) -> float:
    """Returns the length of a step of the owners alone, in units."""
    return dry_run(owners_program(schedule, ownership.grid, ownership.owners).whole(), ownership).makespan


@looped("schedule", NAMED)
def test_a_schedule_orders_any_number_of_runs_as_its_stages(schedule: str) -> None:
    per_worker, ways = order_of(schedule).stages_per_worker, directions_of(schedule)
    for workers in range(2, 5, ways):
        stages = Grid(workers * per_worker, 8, ways)
        usual = length_of(fresh(stages, per_worker, SCHEDULES[schedule].placement, ways), schedule)
        for more in (0, 1, 2 * workers * per_worker):
            grid = Grid(stages.stages + more, 8, ways, blocks=stages.stages + more)
            ownership = dealt_to(workers, grid, schedule)
            program = build_program(schedule, ownership)
            assert verify(program, ownership) == ()
            assert owners_compute(schedule, grid, ownership.owners).is_scheduled
            if more != 1:
                assert length_of(ownership, schedule) == usual * grid.stages / stages.stages


def test_other_runs_are_those_of_the_list_scheduler() -> None:
    grid = Grid(8, 4, blocks=2)
    assert teams_of("zbv", Ownership(grid, (0, 1, 2, 2, 2, 1, 0, 0))) != ()
    for owners in ((0, 1, 1, 0, 0, 1, 1, 0), (0, 1, 1, 2, 2, 1, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1)):
        assert teams_of("zbv", Ownership(grid, owners)) == ()
    assert teams_of("interleaved", Ownership(grid, (0, 1, 1, 0, 0, 1, 1, 0))) == ()
    few = Grid(8, 3, blocks=2)
    assert teams_of("dualpipev", Ownership(few, (0, 0, 1, 1, 1, 1, 0, 0))) == (), "too few microbatches"
    twice = Ownership(Grid(4, 4, 2, blocks=2), (0, 0, 1, 1, 1, 1, 0, 0))
    assert teams_of("zb1p", twice) == (), "a worker in two pipelines has an order of two schedules"
    sharded = Ownership(Grid(4, 4, 2, blocks=2, fsdp=1), (0, 0, 1, 1, 2, 2, 2, 3))
    assert teams_of("zb1p", sharded) == (), "owners in other pipelines put a stage together at the same places"


@looped("schedule", [name for name in SCHEDULES if directions_of(name) == 1])
def test_shards_of_unlike_runs_are_unsharded_stage_by_stage(schedule: str) -> None:
    """Two pipelines with the same runs: no worker has more unsharded than a stage, however many blocks that is."""
    grid = Grid(11, 6, 2, blocks=11, fsdp=1)
    ownership = dealt_to(3, grid, schedule)
    program = build_program(schedule, ownership)
    assert verify(program, ownership) == ()
    (one, other) = teams_of(schedule, ownership)
    assert one.stages == other.stages
    longest = max(len(run) for run in one.stages[0])
    assert {most_whole(actions) for actions in program.values()} <= {*range(1, longest + 1)}
    found = assign(ownership, range(4), order=order_of(schedule))
    assert len({team.stages for team in teams_of(schedule, Ownership(grid, found.owners))}) == 1
    assert len({*found.owners}) == 4, "two workers for each pipeline"


@dataclass(frozen=True)
class Dealt(recovery_cases.Job):
    """A job whose blocks are dealt to three workers in unlike runs, or four of two directions."""

    def ownership(self) -> Ownership:
        whole = dealt_to(3 if self.grid.pipelines == 1 else 4, self.grid, self.schedule)
        return self.healed(whole, whole.workers())


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("schedule", NAMED)
def test_a_kill_in_a_step_of_unlike_runs(schedule: str, every: int) -> None:
    job = Dealt(Grid(8, 6, directions_of(schedule), blocks=2), schedule, "eager", log_every=2)
    machine = job.machine()
    assert machine.run(seeded(ANY_ORDER))
    assert_faultless(machine)
    failures = [failure.finish(seeded(ANY_ORDER)) for failure in distinct_kills(job, every, NAMED.index(schedule))]
    assert len(failures) > 200 // every
    for failure in failures:
        assert_faultless(failure)


@looped("schedule", NAMED)
def test_the_policy_deals_blocks_as_the_schedule_has_its_stages(schedule: str) -> None:
    """Two workers, four, then three and one; it took the stages of each worker apart without any change before."""
    order, ways = order_of(schedule), directions_of(schedule)
    grid = Grid(16, 8, ways, blocks=8 // order.stages_per_worker)
    ownership = fresh(grid, order.stages_per_worker, SCHEDULES[schedule].placement, ways)
    measured = MeasuredFacts(replica_bytes=(10**6,) * 16)
    assert assign(ownership, range(2), measured, order=order).owners == ownership.owners
    for count, factor in ((4, 1.35), (3, 1.25), (1, 1)):
        found = assign(ownership, range(count), measured, order=order)
        ownership = Ownership(grid, found.owners)
        units = length_of(ownership, schedule)
        assert units <= factor * 3 * 16 * 8 * ways / count, (count, units)
        if teams_of(schedule, ownership):
            assert step_time(found.owners, grid, measured, schedule) == units


def test_a_slow_worker_has_shorter_runs() -> None:
    order, grid = ScheduleOrder("zbv", 2), Grid(24, 16, blocks=4)
    ownership = fresh(grid, 2, "v")
    found = assign(ownership, range(3), MeasuredFacts(speed={1: 0.5}), order=order).owners
    assert teams_of("zbv", Ownership(grid, found))
    assert found.count(1) < 8 < found.count(0)
