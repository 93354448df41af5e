"""Streams: valid programs, that cost no time where transfers cost none, and that bound what is redone after a kill."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from statistics import mean

import pytest

from engine.core.action import COMPUTE_OPS, Action, Op, Program
from engine.core.ownership import Grid, Ownership, Redundancy, Slot, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.core.program.passes import is_streamed
from engine.core.program.schedules import SCHEDULES
from engine.core.program.verify import verify
from tests.core.drawing import drawn_program, plain, program_of
from tests.core.recovery_cases import Failure, Job, assert_faultless, distinct_kills, random_history, random_job, seeded
from tests.looped import looped
from tests.soaked import soaked

BOTH: tuple[Redundancy, ...] = ("lazy", "eager")
SHADOWED = Ownership(Grid(2, 3), (0, 1), ((1,), (0,)))


def without_end(program: Program) -> Program:
    """Returns a program without what follows its compute actions."""
    return {worker: line[: [a.op for a in line].index(Op.REDUCE_GRAD)] for worker, line in program.items()}


def test_streams_stand_behind_a_backward_and_what_it_hands_on() -> None:
    ownership = replace(SHADOWED, grid=Grid(2, 2))
    assert drawn_program(without_end(build_program("1f1b", ownership, "lazy", log_every=1))) == plain(
        """
        0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0STREAM0 1STREAM0 0RECV_B1 0B1
        1: 1RECV_F0 1F0 1B0 1SEND_B0 1STREAM0 1RECV_F1 1F1 1B1 1SEND_B1 0STREAM0
        """
    )


def test_a_shadow_runs_no_forward_that_has_come_with_a_stream() -> None:
    grid = Grid(4, 6)
    ownership = with_shadows(fresh(grid), "eager", 1, range(4))
    for shadow, line in build_program("1f1b", ownership, "eager", log_every=2).items():
        for slot in ownership.shadowed_by(shadow):
            mine = [a for a in line if (a.pipeline, a.stage) == slot and a.op in (Op.F, Op.STREAM)]
            reached = -1
            for action in mine:
                assert action.microbatch > reached, (shadow, action)
                reached = action.microbatch if action.op is Op.STREAM else reached
    assert Action(1, Op.F, 5) in build_program("1f1b", ownership, "eager", log_every=2)[0], "behind the last stream"


def test_without_shadows_nothing_is_streamed() -> None:
    ownership = fresh(Grid(2, 3))
    assert build_program("1f1b", ownership, "lazy", log_every=1) == build_program("1f1b", ownership, "lazy")


def test_who_is_healing_takes_no_stream() -> None:
    healing = {(0, (0, 1))}
    program = build_program("1f1b", SHADOWED, "lazy", healing, log_every=1)
    assert {action.stage for line in program.values() for action in line if action.op is Op.STREAM} == {0}
    assert verify(program, SHADOWED, healing) == ()


def shapes() -> list[tuple[str, Ownership, Redundancy]]:
    found: list[tuple[str, Ownership, Redundancy]] = []
    for name, stages, microbatches, pipelines in product(SCHEDULES, (1, 3), (1, 6), (1, 2)):
        schedule, per_worker = SCHEDULES[name], max(1, SCHEDULES[name].stages_per_worker[0])
        if stages * pipelines > 1 and microbatches >= schedule.least_microbatches(stages):
            ownership = fresh(Grid(stages * per_worker, microbatches, pipelines), per_worker, schedule.placement)
            for redundancy in BOTH:
                level = min(2, stages * pipelines - 1)
                found.append((name, with_shadows(ownership, redundancy, level, ownership.workers()), redundancy))
    return found


@pytest.mark.parametrize("every", [3, soaked(1)])
@pytest.mark.parametrize("log_every", [1, 2, 3])
def test_every_schedule_can_stream(log_every: int, every: int) -> None:
    """Each shadow takes each stream once; where transfers take no time, nobody's step takes longer for it.

    Each shape has one of the numbers of microbatches per stream, in the soak all of them.
    """
    for name, ownership, redundancy in shapes()[log_every % every :: every]:
        program = build_program(name, ownership, redundancy, log_every=log_every)
        assert verify(program, ownership) == (), (name, ownership.grid, redundancy)
        wanted = [
            m for m in range(ownership.grid.microbatches) if is_streamed(m, log_every, ownership.grid.microbatches)
        ]
        for slot in ownership.grid.slots():
            for replica in ownership.replicas(*slot):
                mine = [a for a in program[replica] if a.op is Op.STREAM and (a.pipeline, a.stage) == slot]
                assert [a.microbatch for a in mine] == wanted
        plainly = build_program(name, ownership, redundancy)
        assert dry_run(program, ownership).makespan <= dry_run(plainly, ownership).makespan


def behind(program: Program, ownership: Ownership, slot: Slot) -> int:
    """Returns how many backwards of a slot its first shadow has not got, at most, in a run with the usual costs."""
    added = streamed = most = 0
    shadow = ownership.shadows_of(*slot)[0]
    ends = sorted((span.end, span.action.op is not Op.STREAM, span) for span in dry_run(program, ownership).spans)
    for _, _, (_, _, worker, action) in ends:
        if (action.pipeline, action.stage) == slot:
            if action.op in (Op.B, Op.W):
                added = action.microbatch + 1
            elif action.op is Op.STREAM and worker == shadow:
                streamed = action.microbatch + 1
            most = max(most, added - streamed)
    return most


@looped("log_every", [1, 2, 3])
@looped("schedule", ["1f1b", "gpipe", "zb1p"])
def test_what_a_shadow_lacks_is_bounded(schedule: str, log_every: int) -> None:
    for stages, microbatches, pipelines, redundancy in product((2, 4), (4, 9), (1, 2), BOTH):
        grid = Grid(stages, microbatches, pipelines)
        ownership = with_shadows(fresh(grid), redundancy, 1, range(stages * pipelines))
        program = build_program(schedule, ownership, redundancy, log_every=log_every)
        for slot in grid.slots():
            assert behind(program, ownership, slot) <= log_every + 1


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.soak), "zb1p"])
def test_every_single_kill_of_a_job_that_streams(schedule: str) -> None:
    """Afterwards every replica is what it is without a fault, and less is computed again than without streams.

    After every second action.
    """
    plainly = mean(map(num_computed, distinct_kills(Job(Grid(3, 6), schedule), 2)))
    for redundancy, log_every in product(BOTH, (1, 2)):
        failures = list(distinct_kills(Job(Grid(3, 6), schedule, redundancy, log_every=log_every), 2))
        for number, failure in enumerate(failures):
            assert_faultless(failure.finish(seeded(number)))
        assert mean(map(num_computed, failures)) < 0.95 * plainly


def num_computed(failure: Failure) -> int:
    """Returns how many actions of a plan compute."""
    return sum(action.op in COMPUTE_OPS for line in failure.plan.program.values() for action in line)


def test_random_histories_of_jobs_that_stream() -> None:
    survived = failures = 0
    for seed in range(150):
        order = seeded(seed)
        history = random_history(replace(random_job(order), log_every=order.choice((1, 1, 2, 3))), order)
        if history is not None:
            assert_faultless(history[0])
            survived += 1
            failures += len(history[1])
    assert survived > 50 and failures > 100


@pytest.mark.parametrize(
    ("spoiled", "rule"),
    [
        ("0B0 0STREAM0 0F1 0B1", ""),
        ("0B0 0F1 0B1 0STREAM0", "worker 0, position 4: 0STREAM0: comes too late behind 0B1"),
        ("0STREAM0 0B0 0F1 0B1", "worker 0, position 1: 0STREAM0: stands before 0B0, which it requires"),
    ],
)
def test_a_stream_holds_just_the_microbatches_so_far(spoiled: str, rule: str) -> None:
    ownership = Ownership(Grid(1, 2), (0,), ((1,),))
    program = program_of(
        f"""
        0: 0F0 {spoiled} 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
        1: 0STREAM0 0LOG 0COMMIT 0STEP
        """
    )
    assert [str(each) for each in verify(program, ownership)] == ([rule] if rule else [])


@looped(
    ("shadow", "rule"),
    [
        ("0F0 0F1 0STREAM0", ""),
        ("0LOG", "worker 1: 0STREAM0: is missing"),
        ("0STREAM1 0STREAM0", "worker 1, position 0: 0STREAM1: there is no other worker at the other end"),
        ("0STREAM0 0STREAM0", "worker 1, position 1: 0STREAM0: stands twice"),
        ("0STREAM0 0F0", "worker 1, position 1: 0F0: comes too late behind 0STREAM0"),
        ("0LOG 0STREAM0", "worker 1, position 1: 0STREAM0: comes too late behind 0LOG"),
    ],
)
def test_a_shadow_takes_each_stream_once_and_in_time(shadow: str, rule: str) -> None:
    ownership = Ownership(Grid(1, 2), (0,), ((1,),))
    log = "" if "LOG" in shadow else "0LOG"
    program = program_of(
        f"""
        0: 0F0 0B0 0STREAM0 0F1 0B1 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
        1: {shadow} {log} 0COMMIT 0STEP
        """
    )
    assert [str(each) for each in verify(program, ownership)] == ([rule] if rule else [])
