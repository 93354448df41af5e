"""Copies of residuals to the host: verified, within the time that the link has, and refused out of order."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from engine.core.action import LEAVE_OPS, Action, Op
from engine.core.job.job import Job as JobFields
from engine.core.job.job_rules import unsliced_schedules
from engine.core.job.partition import initial_program
from engine.core.ownership import Grid, fresh
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.core.program.offload import line_with_offloads, with_copy_times
from engine.core.program.schedules import SCHEDULES
from engine.core.program.verify import verify
from engine.core.value import Kind, Value
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


def peaks(schedule: str, workers: int, microbatches: int, copy_time: float, blocks: int = 1) -> list[tuple[int, int]]:
    """Returns what each worker keeps and stashes, in residuals of blocks; copies make a step at most 1.02 longer."""
    v = 2 if SCHEDULES[schedule].takes(2) and schedule != "zb1p" else 1
    fields: dict[str, Any] = {
        "stages": workers * v,
        "stages_per_worker": v,
        "microbatches": microbatches,
        "blocks": blocks,
    }
    job = JobFields(**fields, schedule=schedule, redundancy="none", model_args={"depth": 62})
    program, ownership = initial_program(job)
    whole = dry_run(program, ownership)
    program, _ = initial_program(replace(job, offload="host", offload_time=copy_time))
    offloaded = dry_run(program, ownership, with_copy_times(copy_time))
    assert offloaded.makespan <= 1.02 * whole.makespan
    return [(offloaded.peak_stash[worker], whole.peak_stash[worker]) for worker in sorted(program)]


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb1p", "zbv", "v-half", "v-min"])
def test_every_worker_keeps_half_of_its_stash_or_two_residuals_on_a_fast_link(schedule: str, workers: int) -> None:
    """Where an action follows one with another residual, both are there: of three whole residuals none keeps half."""
    for each in (2, 4):
        for keeps, stash in peaks(schedule, workers, each * workers, 0.02):
            assert keeps <= max(stash // 2, min(stash, 2))
        for keeps, stash in peaks(schedule, workers, each * workers, 0.1):
            assert keeps <= max(stash // 2, min(stash, 3))
        for keeps, stash in peaks(schedule, workers, each * workers, 0.1, blocks=4):
            assert keeps <= stash / 2


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


@pytest.mark.parametrize(
    ("schedule", "slices", "moved", "behind"),
    [
        ("zb1p", 1, Action(3, Op.RELOAD_W, 3), Action(3, Op.W, 3)),
        ("1f1b", 2, Action(0, Op.OFFLOAD, 2), Action(0, Op.F, 2)),
    ],
)
def test_a_copy_at_another_place_is_refused(schedule: str, slices: int, moved: Action, behind: Action) -> None:
    """A backward for the weights needs what the one for the input has left, a slice the states of the one before."""
    ownership = fresh(Grid(4, 16 * slices, slices=slices), 1)
    program = dict(build_program(schedule, ownership, copy_time=0.1))
    assert verify(program, ownership) == ()
    line = [action for action in program[moved.stage] if action != moved]
    assert len(line) < len(program[moved.stage])
    line.insert(line.index(behind) + 1, moved)
    violations = verify(program | {moved.stage: tuple(line)}, ownership)
    assert [str(each).split(": ", 1)[1] for each in violations if "on the host" in str(each)]


def _residuals(*microbatches: int) -> set[Value]:
    return {Value(Kind.RESIDUAL, 0, 0, each) for each in microbatches}


def test_the_rest_of_a_step_takes_back_what_is_away() -> None:
    rest = tuple(Action(0, op, each) for op, first in ((Op.F, 3), (Op.B, 0)) for each in range(first, 6))
    line = line_with_offloads(rest, 0.1, here=_residuals(0), away=_residuals(1, 2))
    assert {Action(0, Op.RELOAD, 1), Action(0, Op.RELOAD, 2)} <= set(line)


def test_what_a_forward_makes_again_neither_comes_back_nor_leaves_before_it() -> None:
    rest = tuple(Action(0, op, each) for op in (Op.REDO_F, Op.B) for each in range(4))
    line = line_with_offloads(rest, 0.1, here=_residuals(1, 3), away=_residuals(2))
    for microbatch in range(4):
        ops = [action.op for action in line if action.microbatch == microbatch]
        assert ops in ([Op.REDO_F, Op.B], [Op.REDO_F, Op.OFFLOAD, Op.RELOAD, Op.B])
    assert len(line) > len(rest)


_KILLED = [
    *(("gpipe", 1, 1), ("1f1b", 1, 1), ("zb1p", 1, 1), ("v-half", 2, 1), ("zb1p", 1, 2), ("1f1b", 1, 3)),
    *(
        pytest.param(name, v, slices, marks=pytest.mark.soak)
        for name, schedule in SCHEDULES.items()
        for v in (1, 2)
        for slices in (1, 2)
        if schedule.takes(v) and (slices == 1 or name not in unsliced_schedules())
    ),
]


def killed(schedule: str, stages_per_worker: int, slices: int = 1) -> Job:
    microbatches = slices * max(5 if slices == 1 else 3, SCHEDULES[schedule].least_microbatches(4))
    grid = Grid(4 * stages_per_worker, microbatches, slices=slices)
    job = Job(grid, schedule, stages_per_worker=stages_per_worker, copy_time=0.1, machine_type=OrderedMachine)
    return replace(job, redundancy="eager") if schedule == "1f1b" else job


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("schedule", "stages_per_worker", "slices"), _KILLED)
def test_a_death_and_a_hand_over_after_any_action(
    schedule: str, stages_per_worker: int, slices: int, request: pytest.FixtureRequest
) -> None:
    job = killed(schedule, stages_per_worker, slices)
    every = 1 if request.node.get_closest_marker("soak") else 17 * stages_per_worker**2
    leaves = hand_overs(replace(job, residuals="ship" if slices == 1 else "recompute"), 3 * every)
    taken_back = 0
    for failure in chain(distinct_kills(job, every), leaves):
        ops = [action.op for line in failure.plan.program.values() for action in line]
        taken_back += ops.count(Op.RELOAD) + ops.count(Op.RELOAD_W) > sum(map(ops.count, LEAVE_OPS))
        assert_faultless(failure.finish(seeded(ANY_ORDER)))
    assert taken_back


def test_a_plan_that_leaves_a_residual_on_the_host_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = line_with_offloads
    monkeypatch.setattr(
        provenance, "line_with_offloads", lambda line, time, slices, here, away: placed(line, time, slices, here)
    )
    failures = distinct_kills(killed("gpipe", 1), 3)
    with pytest.raises(KeyError, match="residual"):
        deque(failure.finish(seeded(ANY_ORDER)) for failure in failures)
