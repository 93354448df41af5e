"""Sequence slices: the order of Seq1F1B, and the same sums as a plain loop over the slices, whatever dies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from engine.core.action import COMPUTE_OPS, Op
from engine.core.job.bit_fields import NEUTRAL, twin_of
from engine.core.job.job import Job as JobFields
from engine.core.job.job_rules import check_job
from engine.core.ownership import Grid, Redundancy, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.core.program.schedules import SCHEDULES
from engine.core.program.verify import verify
from tests.core.provenance import State, hashed
from tests.core.recovery_cases import ANY_ORDER, Job, distinct_kills, hand_overs, random_history, random_job, seeded
from tests.looped import looped
from tests.soaked import soaked

_POLICIES: tuple[tuple[Redundancy, bool], ...] = (("lazy", True), ("eager", False))
_SLICED = [name for name, schedule in SCHEDULES.items() if schedule.overlaps is None and name != "dualpipe"]


def _plain_loop(grid: Grid, steps: int) -> State:
    """Returns the state after some steps of a loop: microbatch by microbatch, its slices forwards, then backwards."""
    weights = [f"weights {stage}" for stage in range(grid.stages)]
    buffers = {(d, s): f"buffers {d} {s}" for d, s in grid.slots()}
    for _ in range(steps):
        sums = dict.fromkeys(grid.slots(), "")
        for pipeline in range(grid.pipelines):
            for first in range(0, grid.microbatches, grid.slices):
                _microbatch(grid, pipeline, first, weights, buffers, sums)
        ends = []
        for stage in range(grid.stages):
            every = [(pipeline, stage) for pipeline in range(grid.pipelines)]
            ends.append((hashed(*(sums[slot] for slot in every)), tuple(buffers[slot] for slot in every)))
        logged = [
            (ends[stage], *(ends[each] for each in sorted({stage, *grid.tied_to(stage)})))
            for stage in range(grid.stages)
        ]
        weights = [hashed(of, log) for of, log in zip(weights, logged, strict=True)]
    return {
        slot: {(weights[slot[1]], tuple(buffers[d, slot[1]] for d in range(grid.pipelines)), steps)}
        for slot in grid.slots()
    }


def _microbatch(
    grid: Grid,
    pipeline: int,
    first: int,
    weights: list[str],
    buffers: dict[tuple[int, int], str],
    sums: dict[tuple[int, int], str],
) -> None:
    residuals: dict[tuple[int, int], str] = {}
    for each in range(grid.slices):
        fed = "data"
        for stage in range(grid.stages):
            slot = (pipeline, stage)
            state = (residuals[stage, each - 1],) if each else ()
            seen = hashed(weights[stage], buffers[slot], fed, first + each, *state)
            fed, residuals[stage, each] = (hashed(name, seen, pipeline, stage) for name in "AR")
            buffers[slot] = hashed(buffers[slot], seen)
    carries: dict[int, tuple[str, ...]] = dict.fromkeys(range(grid.stages), ())
    for each in reversed(range(grid.slices)):
        fed = "loss"
        for stage in reversed(range(grid.stages)):
            both = hashed(residuals[stage, each], fed, *carries[stage])
            fed, carries[stage] = hashed("G", both), (hashed("C", both),)
            sums[pipeline, stage] = hashed(sums[pipeline, stage], both)


def _lines(schedule: str, grid: Grid) -> list[str]:
    program = build_program(schedule, fresh(grid))
    return [" ".join(str(each) for each in line if each.op in COMPUTE_OPS) for line in program.values()]


def test_the_backward_of_the_last_slice_comes_first() -> None:
    """Backwards have their numbers in the order in which they run: 1B0 is of slice 1, whose forward is 1F1."""
    assert _lines("1f1b", Grid(2, 4, slices=2)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
    ]


@pytest.mark.parametrize("name", _SLICED)
@pytest.mark.parametrize("slices", [2, 3, soaked(4)])
def test_every_schedule_runs_to_its_end(name: str, slices: int) -> None:
    schedule = SCHEDULES[name]
    for workers in (1, 2, 3, 4):
        for v in {schedule.stages_per_worker[0], min(2, schedule.stages_per_worker[1])}:
            for microbatches in (1, 2, 5):
                grid = Grid(workers * v, microbatches * slices, slices=slices)
                ownership = fresh(grid, v, schedule.placement)
                assert verify(build_program(name, ownership), ownership) == ()
                shadowed = with_shadows(ownership, "eager", 1, ownership.workers())
                assert verify(build_program(name, shadowed, "eager", log_every=slices), shadowed) == ()


@looped("name", _SLICED)
def test_the_worker_that_took_over_has_a_list_of_slices(name: str) -> None:
    """The steps after a death, in the order of the schedule for the workers that are left."""
    schedule = SCHEDULES[name]
    for v in {schedule.stages_per_worker[0], min(2, schedule.stages_per_worker[1])}:
        whole = fresh(Grid(4 * v, 8, slices=2), v, schedule.placement)
        for dead, heir in ((1, 0), (1, 2), (3, 2)):
            ownership = replace(whole, owners=tuple(heir if each == dead else each for each in whole.owners))
            assert verify(build_program(name, ownership), ownership) == ()


@pytest.mark.parametrize(("workers", "slices"), [(2, 2), (4, 2), (4, 4), (8, 4)])
def test_1f1b_stashes_slices_in_place_of_microbatches(workers: int, slices: int) -> None:
    """Worker w holds P - w + N - 1 slices, of which N are a microbatch (arXiv 2406.03488, section 3.2)."""
    grid = Grid(workers, 4 * workers * slices, slices=slices)
    ownership = fresh(grid)
    run = dry_run(build_program("1f1b", ownership), ownership)
    assert run.peak_stash == {worker: workers - worker + slices - 1 for worker in range(workers)}
    assert run.makespan == 3 * (grid.microbatches + workers - 1)


@pytest.mark.timeout(120)
def test_every_single_kill() -> None:
    """Each worker after every third of its actions: afterwards all is as in the plain loop."""
    done, num_kills = Counter[Op](), 0
    for schedule, slices, log_every in (("1f1b", 2, 0), ("1f1b", 3, 3), ("zb1p", 2, 0)):
        grid = Grid(3, 3 * slices, slices=slices)
        for redundancy, retain in _POLICIES:
            job = Job(grid, schedule, redundancy, log_every=log_every, retain=retain)
            for failure in distinct_kills(job, 3, slices):
                machine = failure.finish(seeded(ANY_ORDER))
                assert machine.state() == _plain_loop(grid, machine.newest())
                done.update(action.op for line in failure.plan.program.values() for action in line)
                num_kills += 1
    assert num_kills > 150 and done[Op.REDO_F] and done[Op.I] and done[Op.W], (num_kills, done)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.soak)])
def test_random_histories_of_several_failures(count: int) -> None:
    """Ties, pipelines, levels, steps, heals, failures during recovery."""
    failures = 0
    for seed in range(count):
        order = seeded(seed)
        job, slices = random_job(order), 2 + seed % 2
        grid = replace(job.grid, microbatches=slices * min(job.grid.microbatches, 3), slices=slices)
        history = random_history(replace(job, grid=grid), order)
        if history is not None:
            machine = history[0]
            assert machine.state() == _plain_loop(grid, machine.newest())
            failures += len(history[1])
    assert failures > count // 2


def test_a_worker_hands_over_between_slices() -> None:
    grid = Grid(2, 4, slices=2)
    handed = 0
    for failure in hand_overs(Job(grid)):
        machine = failure.finish(seeded(ANY_ORDER))
        assert machine.state() == _plain_loop(grid, machine.newest())
        handed += any(action.op is Op.HAND for line in failure.plan.program.values() for action in line)
    assert handed


@looped(
    "fields",
    [
        {"fsdp": 1, "pipelines": 2},
        {"variable_shapes": True},
        {"activation_checkpoint": 1},
        {"residuals": "ship"},
        {"loss_normalisation": "tokens"},
        {"schedule": "interleaved-paired", "stages_per_worker": 2},
        {"log_every": 3},
    ],
)
def test_what_does_not_go_with_slices_is_refused_by_its_field(fields: dict[str, Any]) -> None:
    job = JobFields(**fields, slices=2)
    (problem,) = check_job(job)
    assert problem.field == next(iter(fields))
    assert "slices" in problem.expected or problem.field == "schedule"
    assert check_job(replace(job, slices=1)) == []


def test_slices_decide_bits() -> None:
    assert "slices" not in NEUTRAL
    assert twin_of(JobFields(slices=2)).slices == 2
