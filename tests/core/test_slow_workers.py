"""Slow workers, and how often slots move for them: a slow one, a busy machine, a speed that flaps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.core.ownership import Grid, Ownership
from engine.core.protocol import worker_times
from engine.core.protocol.assignment import assign, step_time
from engine.core.protocol.measured_facts import MeasuredFacts
from engine.core.protocol.rebalancing import QUIET_STEPS, Rebalancing, after_assignment, is_due
from engine.core.protocol.worker_times import Compute, PaceChange, Paces, after_step, members_only, speeds
from tests.looped import looped

GRID = Grid(16, 16)
WORKERS = (0, 1, 2, 3)
BEGIN_STEP = 60
Factor = Callable[[int, int], float]  # takes a worker and a step; returns by how much its work takes longer


class Training:
    """A run of four workers with four blocks each, whose coordinator watches paces and asks the policy."""

    def __init__(self, factor: Factor, seed: int = 0, noise: float = 0.03):
        self.factor, self.noise, self.dice = factor, noise, random.Random(seed)  # noqa: S311
        self.paces: Paces = {}
        self.ownership = Ownership(GRID, tuple(place // 4 for place in range(16)))
        self.state = Rebalancing(WORKERS)
        self.changes: list[PaceChange] = []
        self.moves: list[int] = []

    def step(self, step: int) -> None:
        loads = {worker: 3.0 * len(self.ownership.slots_of(worker)) for worker in self.ownership.workers()}
        computed = {
            worker: Compute(0.01 * work * self.factor(worker, step) * self.dice.lognormvariate(0, self.noise), work)
            for worker, work in loads.items()
        }
        self.paces, changes = after_step(self.paces, step, computed)
        self.changes += changes
        if is_due(self.state, step, WORKERS, speeds(self.paces)):
            measured = MeasuredFacts((0.01,) * 16, (0.02,) * 16, speeds(self.paces), replica_bytes=(10**7,) * 16)
            wanted = assign(self.ownership, WORKERS, measured)
            self.state = after_assignment(
                self.state, step, WORKERS, speeds(self.paces), moves=wanted.owners != self.ownership.owners
            )
            if wanted.owners != self.ownership.owners:
                self.moves.append(step)
                self.ownership = Ownership(GRID, wanted.owners)

    def run(self, steps: int) -> Training:
        for step in range(steps):
            self.step(step)
        return self


def slow_from(begin: int, end: int, times: float = 2.0, worker: int = 2) -> Factor:
    return lambda each, step: times if each == worker and begin <= step < end else 1.0


def test_a_slow_worker_is_reported_and_relieved_after_eight_steps_and_trusted_again() -> None:
    run = Training(slow_from(BEGIN_STEP, 200)).run(400)
    assert [(each.step, each.worker) for each in run.changes] == [(BEGIN_STEP + 7, 2), (200 + 19, 2)]
    assert run.changes[0].slowness == pytest.approx(2, abs=0.1)
    assert run.changes[0].why.startswith("worker 2 is slow: it takes ")
    assert run.changes[0].why.endswith(" times its usual time for the same work, for at least 8 steps in a row")
    assert run.changes[1].slowness == 1
    assert "as fast as usual again" in run.changes[1].why
    assert run.moves == [BEGIN_STEP + 7, 200 + 19]
    assert [run.ownership.owners.count(worker) for worker in WORKERS] == [4, 4, 4, 4]


@pytest.mark.parametrize("of_a_step_s", [0.002, 0.02, 0.5])
def test_a_worker_is_slow_only_after_a_second_of_computing(of_a_step_s: float) -> None:
    paces: Paces = {}
    slow_s = 2 * of_a_step_s
    for step in range(BEGIN_STEP + int(1 / slow_s) + 8):
        mine = Compute(slow_s if step >= BEGIN_STEP else of_a_step_s, 1.0)
        paces, changes = after_step(paces, step, {0: Compute(of_a_step_s, 1.0), 1: Compute(of_a_step_s, 1.0), 2: mine})
        if changes:
            break
    slow_steps = step + 1 - BEGIN_STEP
    assert max(8, 1 / slow_s - 1) <= slow_steps <= max(8, 1 / slow_s + 1)
    assert "worker 2 is slow" in changes[0].why


def test_the_relief_is_near_the_best_and_the_worker_stays() -> None:
    run = Training(slow_from(BEGIN_STEP, 200)).run(BEGIN_STEP + 10)
    measured = MeasuredFacts(speed={2: 0.5})
    owned = [run.ownership.owners.count(worker) for worker in WORKERS]
    assert 1 <= owned[2] <= 2
    ideal = 3 * GRID.stages / 3.5  # the work of a microbatch over the speed of all
    assert step_time(run.ownership.owners, GRID, measured) <= 1.10 * (ideal * GRID.microbatches + 3 * ideal)


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_steps_on_a_busy_machine_move_nothing(seed: int) -> None:
    """Each step has noise, now and then one worker is hit for some steps, and the machine is slow for long times."""
    dice, hit, busy = random.Random(100 + seed), [0] * 4, [0]  # noqa: S311

    def factor(worker: int, _: int) -> float:
        if worker == 0:
            busy[0] = dice.randint(5, 60) if busy[0] == 0 and dice.random() < 0.01 else max(0, busy[0] - 1)
        hit[worker] = dice.randint(1, 4) if hit[worker] == 0 and dice.random() < 0.005 else max(0, hit[worker] - 1)
        return (2.0 if busy[0] else 1.0) * (2.5 if hit[worker] else 1.0)

    run = Training(factor, seed, noise=0.25).run(1000)
    assert run.moves == []
    assert run.changes == []


@looped("period", [4, 6, 8, 12, 30, 45])
def test_a_speed_that_flaps_makes_one_move_in_fifty_steps(period: int) -> None:
    run = Training(
        lambda worker, step: 2.0 if worker == 1 and step >= 20 and step % (2 * period) < period else 1.0
    ).run(500)
    assert all(later - move >= QUIET_STEPS for move, later in zip(run.moves, run.moves[1:], strict=False))
    assert len(run.moves) <= 1 or period > worker_times.WELL_STEPS - 6


def test_a_worker_that_becomes_slower_still_is_told_again_and_so_is_one_that_becomes_less_slow() -> None:
    factors = {0: 1.0, 60: 2.0, 120: 4.0, 180: 2.0}
    run = Training(lambda worker, step: factors[max(each for each in factors if each <= step)] if worker == 0 else 1.0)
    run.run(240)
    assert [round(each.slowness) for each in run.changes] == [2, 4, 2]
    assert "worker 0 is less slow: " in run.changes[-1].why


def test_a_machine_that_is_slow_for_all_makes_no_worker_slow() -> None:
    assert Training(lambda _, step: 3.0 if step >= 100 else 1.0).run(200).changes == []


def test_the_pace_goes_by_work_so_that_more_slots_are_not_slow() -> None:
    paces: Paces = {}
    for step in range(60):
        work = 1.0 if step < 30 else 3.0
        paces, changes = after_step(paces, step, {0: Compute(0.1 * work, work), 1: Compute(0.1, 1.0), 2: Compute(0, 0)})
        assert changes == ()
    assert [*members_only(paces, [1, 2])] == [1]


def test_a_change_of_workers_is_due_at_once_and_is_no_move_of_own_will() -> None:
    state = Rebalancing((0, 1), moved=100)
    assert not is_due(state, 120, [1, 0], {1: 0.5})
    assert not is_due(state, 150, [1, 0], {})
    assert is_due(state, 150, [0, 1], {1: 0.5})
    assert is_due(state, 120, [0, 1, 2], {})
    present = (0, 1, 1)
    wanted = assign(Ownership(Grid(3, 4), present), [0, 1, 2])
    assert wanted.owners != present
    assert after_assignment(state, 120, [0, 1, 2], {}, moves=True) == Rebalancing((0, 1, 2), (), 100)
    assert after_assignment(state, 160, [0, 1], {1: 0.5}, moves=True) == Rebalancing((0, 1), ((1, 0.5),), 160)


def test_a_slow_worker_that_computes_nothing_is_tried_again_after_a_thousand_steps() -> None:
    paces: Paces = {}
    changes: list[PaceChange] = []
    for step in range(1100):
        works = step < 70
        mine = {2: Compute(0.1 * (8.0 if step >= 60 else 1.0), 1.0)} if works else {}
        paces, new = after_step(paces, step, {0: Compute(0.1, 1.0), 1: Compute(0.1, 1.0), **mine})
        changes += new
    assert [(each.step, round(each.slowness)) for each in changes] == [(67, 8), (1069, 2)]
    assert changes[1].why.endswith("is tried again: it computed nothing for 1000 steps")


@pytest.mark.parametrize(("times", "owned"), [(2.0, 2), (4.0, 1), (6.0, 1), (20.0, 0)])
def test_a_slow_worker_keeps_a_slot_by_which_it_is_seen_to_be_well_unless_the_step_is_much_longer(
    times: float, owned: int
) -> None:
    grid = Grid(12, 8)
    thirds = Ownership(grid, (0,) * 4 + (1,) * 4 + (2,) * 4)
    found = assign(thirds, (0, 1, 2), MeasuredFacts(speed={1: 1 / times}))
    assert found.owners.count(1) == owned
    without = assign(thirds, (0, 2), MeasuredFacts(speed={1: 1 / times}))
    measured = MeasuredFacts(speed={1: 1 / times})
    assert step_time(found.owners, grid, measured) <= 1.10 * step_time(without.owners, grid, measured)
