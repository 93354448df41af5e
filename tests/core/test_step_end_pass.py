"""Healing after any deaths: a state is sent before its owner waits for anything, so that no two wait for each other."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import combinations

import pytest

from engine.core.action import Op
from engine.core.ownership import Grid, Ownership, Redundancy, Slot, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.passes import with_end_of_step
from engine.core.program.verify import verify
from engine.core.protocol.orders import held_at_boundary
from tests.core.drawing import program_of
from tests.core.recovery_cases import heirs, seeded

Healing = frozenset[tuple[int, Slot]]


def healed(
    ownership: Ownership, dead: Collection[int], redundancy: Redundancy, level: int
) -> tuple[Ownership, Healing] | None:
    """Returns the ownership of the step after some deaths, and who is healed in it; None when a stage is lost."""
    members = [worker for worker in ownership.workers() if worker not in dead]
    left = heirs(ownership, [held_at_boundary(worker, 1, ownership) for worker in members])
    if -1 in left.owners:
        return None
    wanted = with_shadows(left, redundancy, level, members)
    return wanted, frozenset(
        (worker, slot)
        for slot in left.grid.slots()
        for worker in wanted.shadows_of(*slot)
        if worker not in left.shadows_of(*slot)
    )


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_two_first_stages_that_heal_each_other_do_not_wait_for_each_other(microbatches: int) -> None:
    """With few microbatches a first stage has sent its last before it waits for the first time.

    It then took the state that it was to get before it sent the one that the other was to get.
    """
    found = 0
    for dead in combinations(range(6), 2):
        grid = Grid(3, microbatches, pipelines=2)
        case = healed(with_shadows(fresh(grid), "eager", 1, range(6)), dead, "eager", 1)
        if case is not None:
            ownership, healing = case
            program = build_program("1f1b", ownership, "eager", healing)
            assert verify(program, ownership, healing) == (), dead
            found += sum(op is Op.HEAL for actions in program.values() for _, op, _, _ in actions)
    assert found > 50


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.soak)])
def test_heals_are_no_circle_whatever_dies_one_after_another(count: int) -> None:
    """Streams are waited for as well; so every step is verified with whatever else it has."""
    order, num_heals, num_streams = seeded(0), 0, 0
    for _ in range(count):
        for schedule, case, redundancy, log_every in _history(order):
            ownership, healing = case
            program = build_program(schedule, ownership, redundancy, healing, log_every)
            assert verify(program, ownership, healing) == (), (schedule, case, redundancy, log_every)
            num_heals += len(healing)
            num_streams += any(op is Op.STREAM for actions in program.values() for _, op, _, _ in actions)
    assert num_heals > 3 * count
    assert num_streams > 0.3 * count


def test_a_state_is_sent_before_a_stream_is_waited_for() -> None:
    ownership = Ownership(Grid(2, 2), (0, 1), ((1,), (0,)))
    program = program_of("0: 0F0 0SEND_F0 1STREAM0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1")
    ended = with_end_of_step(program, ownership, healing={(1, (0, 0))})
    assert " ".join(map(str, ended[0])).startswith("0F0 0SEND_F0 0HEAL 1STREAM0 0F1 0SEND_F1 0RECV_B0")


def _history(order: random.Random) -> list[tuple[str, tuple[Ownership, Healing], Redundancy, int]]:
    """Returns the steps in which somebody is healed, of a job that loses one or two workers up to three times."""
    grid = Grid(order.randint(2, 4), order.choice((1, 2, 3, 4)), order.choice((1, 2, 2, 3)))
    redundancy: Redundancy = order.choice(("lazy", "eager", "eager"))
    level, log_every, schedule = order.choice((1, 1, 2, 3)), order.choice((0, 1, 2)), order.choice(("1f1b", "gpipe"))
    ownership = with_shadows(fresh(grid), redundancy, level, range(grid.stages * grid.pipelines))
    steps = []
    for _ in range(3):
        workers = ownership.workers()
        case = healed(ownership, order.sample(workers, min(order.choice((1, 2)), len(workers) - 1)), redundancy, level)
        if case is None:
            break
        steps += [(schedule, case, redundancy, log_every)] if case[1] else []
        ownership = case[0]
    return steps
