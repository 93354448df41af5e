"""Copies of residuals to the host: verified, within the time that the link has, and refused out of order."""

from __future__ import annotations

import pytest

from engine.core.action import Action, Op
from engine.core.ownership import Grid, fresh
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.core.program.offload import line_with_offloads, with_copy_times
from engine.core.program.schedules import SCHEDULES
from engine.core.program.verify import verify

HALVED = {"1f1b", "eager-1f1b", "gpipe", "interleaved", "looped-bfs", "v-min", "v-half", "zbv", "zb1p"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_link_that_carries_them_halves_the_stash_of_the_first_worker_at_two_percent(schedule: str) -> None:
    v = 2 if SCHEDULES[schedule].takes(2) else 1
    ownership = fresh(Grid(8 * v, 32), v, SCHEDULES[schedule].placement)
    whole = dry_run(build_program(schedule, ownership), ownership)
    program = build_program(schedule, ownership, copy_time=0.5)
    assert verify(program, ownership) == ()
    offloaded = dry_run(program, ownership, with_copy_times(0.5))
    assert offloaded.makespan <= 1.02 * whole.makespan
    if schedule in HALVED:
        assert offloaded.peak_stash[0] <= whole.peak_stash[0] / 2


def test_a_slow_link_carries_fewer_residuals_and_a_very_slow_one_none() -> None:
    ownership = fresh(Grid(8, 32), 1)
    peaks = []
    for copy_time in (0.25, 2.0, 20.0):
        program = build_program("1f1b", ownership, copy_time=copy_time)
        peaks.append(dry_run(program, ownership).peak_stash[0])
    assert peaks == [2, 7, 8]


def test_the_dry_run_waits_for_a_link_that_is_too_slow() -> None:
    ownership = fresh(Grid(8, 32), 1)
    program = build_program("1f1b", ownership, copy_time=0.5)
    in_time = dry_run(program, ownership, with_copy_times(0.5)).makespan
    assert dry_run(program, ownership, with_copy_times(5.0)).makespan > 1.5 * in_time


def test_a_backward_whose_residual_is_away_is_refused() -> None:
    ownership = fresh(Grid(8, 32), 1)
    program = dict(build_program("1f1b", ownership, copy_time=0.5))
    program[0] = tuple(action for action in program[0] if action != Action(0, Op.RELOAD, 5))
    (violation,) = verify(program, ownership)
    assert str(violation).endswith("0B5: finds its residual on the host")


def test_the_rest_of_a_step_takes_back_what_is_away() -> None:
    rest = tuple(Action(0, op, each) for op, first in ((Op.F, 3), (Op.B, 0)) for each in range(first, 6))
    line = line_with_offloads(rest, 0.1, here={(0, 0, 0)}, away={(0, 0, 1), (0, 0, 2)})
    assert {Action(0, Op.RELOAD, 1), Action(0, Op.RELOAD, 2)} <= set(line)
