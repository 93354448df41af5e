"""Copies of residuals to the host: verified, within the time that the link has, and refused out of order."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import chain

import pytest

from engine.core.action import Action, Op
from engine.core.ownership import Grid, fresh
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.core.program.offload import line_with_offloads, with_copy_times
from engine.core.program.schedules import SCHEDULES
from engine.core.program.verify import verify
from tests.core import provenance
from tests.core.recovery_cases import ANY_ORDER, Job, assert_faultless, distinct_kills, hand_overs, seeded
from tests.doubles.ordered_machine import OrderedMachine

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


def held_parts(line: tuple[Action, ...]) -> int:
    """Returns the most residuals at once that no link takes away: of a forward, and until parts for the weights."""
    pending, most, in_parts = 0, 0, {each.microbatch for each in line if each.op is Op.W}
    for action in line:
        pending += (action.op is Op.I and action.microbatch in in_parts) - (action.op is Op.W)
        most = max(most, pending + (action.op is Op.F))
    return most


@pytest.mark.parametrize(("copy_time", "more"), [(0.1, 1), (0.5, 2)])
@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "v-half", "v-min"])
def test_every_worker_keeps_half_of_its_stash_or_the_least_that_it_needs(
    schedule: str, workers: int, copy_time: float, more: int
) -> None:
    """The least: one residual comes back beside what stays; on a link with half the speed of a forward, one leaves."""
    v = SCHEDULES[schedule].stages_per_worker[0]
    ownership = fresh(Grid(workers * v, 4 * workers), v, SCHEDULES[schedule].placement)
    program = build_program(schedule, ownership)
    whole = dry_run(program, ownership)
    offloaded = dry_run(build_program(schedule, ownership, copy_time=copy_time), ownership, with_copy_times(copy_time))
    for worker, line in program.items():
        least = held_parts(line) + more
        assert offloaded.peak_stash[worker] <= max(whole.peak_stash[worker] // 2, least), worker
    assert offloaded.makespan <= 1.02 * whole.makespan


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


def test_what_a_forward_makes_again_neither_comes_back_nor_leaves_before_it() -> None:
    rest = tuple(Action(0, op, each) for op in (Op.REDO_F, Op.B) for each in range(4))
    line = line_with_offloads(rest, 0.1, here={(0, 0, 1), (0, 0, 3)}, away={(0, 0, 2)})
    for microbatch in range(4):
        ops = [action.op for action in line if action.microbatch == microbatch]
        assert ops in ([Op.REDO_F, Op.B], [Op.REDO_F, Op.OFFLOAD, Op.RELOAD, Op.B])
    assert len(line) > len(rest)


_KILLED = [
    *(("gpipe", 1), ("1f1b", 1), ("zb1p", 1), ("v-half", 2)),
    *(
        pytest.param(name, v, marks=pytest.mark.soak)
        for name, schedule in SCHEDULES.items()
        for v in (1, 2)
        if schedule.takes(v)
    ),
]


def killed(schedule: str, stages_per_worker: int) -> Job:
    microbatches = max(5, SCHEDULES[schedule].least_microbatches(4))
    grid = Grid(4 * stages_per_worker, microbatches)
    job = Job(grid, schedule, stages_per_worker=stages_per_worker, copy_time=0.1, machine_type=OrderedMachine)
    return replace(job, redundancy="eager") if schedule == "1f1b" else job


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("schedule", "stages_per_worker"), _KILLED)
def test_a_death_and_a_hand_over_after_any_action(
    schedule: str, stages_per_worker: int, request: pytest.FixtureRequest
) -> None:
    job = killed(schedule, stages_per_worker)
    every = 1 if request.node.get_closest_marker("soak") else 17 * stages_per_worker**2
    leaves = hand_overs(replace(job, residuals="ship"), 3 * every)
    taken_back = 0
    for failure in chain(distinct_kills(job, every), leaves):
        ops = [action.op for line in failure.plan.program.values() for action in line]
        taken_back += ops.count(Op.RELOAD) > ops.count(Op.OFFLOAD)
        assert_faultless(failure.finish(seeded(ANY_ORDER)))
    assert taken_back


def test_a_plan_that_leaves_a_residual_on_the_host_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = line_with_offloads
    monkeypatch.setattr(provenance, "line_with_offloads", lambda line, time, here, away: placed(line, time, here))
    failures = distinct_kills(killed("gpipe", 1), 3)
    with pytest.raises(KeyError, match="residual"):
        deque(failure.finish(seeded(ANY_ORDER)) for failure in failures)
