"""The planner: plans as drawings, every single kill, random histories of several, and that no plan does too much."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from math import log2
from typing import Any

import pytest

from engine.core.action import COMPUTE_OPS, RECEIVE_OPS, SEND_OPS, Op, Program
from engine.core.errors import InvariantError, ScheduleError
from engine.core.ownership import Grid, Ownership, Redundancy, fresh
from engine.core.program import planner as recovery
from engine.core.program.dry_run import dry_run
from engine.core.program.inventory import Inventory, ValueRuns
from engine.core.program.passes import with_transfers
from engine.core.program.planner import PlanInput, held_at_start, make_plan
from engine.core.value import Held, Kind, Value
from tests.core.drawing import drawn_program, plain
from tests.core.recovery_cases import (
    Failure,
    Job,
    assert_faultless,
    distinct_kills,
    fail,
    random_history,
    random_job,
    seeded,
)
from tests.soaked import soaked

_BOTH = ((0, 0), (0, 1))
_ONE_LEFT = Ownership(Grid(2, 2), (0, 0))


def _values(kind: Kind, stage: int, *microbatches: int) -> tuple[Value, ...]:
    return tuple(Value(kind, 0, stage, each) for each in microbatches)


def _compute(program: Program) -> str:
    return drawn_program({w: tuple(each for each in line if each.op in COMPUTE_OPS) for w, line in program.items()})


def test_heir_does_the_forwards_and_backwards_of_the_victim() -> None:
    kept = _values(Kind.ACTIVATION, 0, 0, 1) + _values(Kind.RESIDUAL, 0, 0, 1)
    plan = make_plan(PlanInput(2, 4, _ONE_LEFT, (Inventory(0, 5, _BOTH, counted={(0, 0): 2}, values=ValueRuns(kept)),)))
    assert (plan.step, plan.adopted, plan.lost_stages) == (5, (), ())
    assert drawn_program(plan.program) == plain(
        """
        0: 1F0 1B0 1F1 0B0 1B1 0B1 0REDUCE_GRAD 1REDUCE_GRAD 0LOG 1LOG 0COMMIT 1COMMIT 0STEP 1STEP
        """
    )


def test_what_nobody_holds_is_redone_without_counting_twice() -> None:
    """The activations are gone, and the first of two backwards of the victim's neighbour has been added."""
    held = Inventory(0, 5, _BOTH, {(0, 0): 2}, {(0, 0): 1}, values=ValueRuns(_values(Kind.RESIDUAL, 0, 1)))
    plan = make_plan(PlanInput(2, 4, _ONE_LEFT, (held,)))
    assert _compute(plan.program) == "0: 0f0 1F0 1B0 0f1 1F1 1B1 0B1", "what had been done before comes first"


def test_gradient_of_a_backward_that_was_added_is_redone_for_the_input_only() -> None:
    """Worker 1 has added both of stage 1; worker 0 has died with the gradients, its heir adds from the first."""
    held = Inventory(1, 5, _BOTH, {(0, 1): 2}, {(0, 1): 2}, values=ValueRuns(_values(Kind.RESIDUAL, 1, 0, 1)))
    plan = make_plan(PlanInput(2, 4, Ownership(Grid(2, 2), (1, 1)), (held,)))
    assert _compute(plan.program) == "1: 0F0 1I0 0B0 0F1 1I1 0B1"


def test_weights_part_alone_when_the_input_part_was_done() -> None:
    one = Ownership(Grid(1, 1), (0,))
    held = Inventory(0, 5, ((0, 0),), {(0, 0): 1}, values=ValueRuns(_values(Kind.PENDING, 0, 0)))
    assert _compute(make_plan(PlanInput(2, 4, one, (held,))).program) == "0: 0W0"


def test_held_values_are_sent_at_the_front_in_the_order_of_need() -> None:
    ownership = Ownership(Grid(2, 2), (0, 1))
    sender = Inventory(
        0,
        5,
        ((0, 0),),
        {(0, 0): 2},
        values=ValueRuns(_values(Kind.ACTIVATION, 0, 0, 1) + _values(Kind.RESIDUAL, 0, 0, 1)),
    )
    plan = make_plan(PlanInput(2, 4, ownership, (sender, Inventory(1, 5, ((0, 1),)))))
    assert drawn_program(plan.program) == plain(
        """
        0: 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
        1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1LOG 1COMMIT 1STEP
        """
    )


def test_a_stage_that_is_logged_everywhere_is_only_logged_again_where_it_lacks() -> None:
    ownership = Ownership(Grid(2, 1), (0, 1), shadows=((1, 2), (0,)))
    given = (
        Inventory(0, 5, _BOTH, {(0, 0): 1}, {(0, 0): 1}, logged=((0, 0),)),
        Inventory(1, 5, _BOTH, {(0, 1): 1}, {(0, 1): 1}, logged=((0, 0),)),
        Inventory(2, 5, ((0, 0),)),
    )
    plan = make_plan(PlanInput(2, 4, ownership, given))
    assert drawn_program(plan.program) == plain(
        """
        0: 0LOG 1LOG 0COMMIT 1COMMIT 0STEP 1STEP
        1: 1REDUCE_GRAD 1LOG 1COMMIT 0COMMIT 1STEP 0STEP
        2: 0LOG 0COMMIT 0STEP
        """
    )


def test_logs_of_tied_stages_count_only_together() -> None:
    """Stage 0 is logged and stage 2 is not: what is logged is ignored, and the accumulator is reduced again."""
    grid = Grid(3, 1, ties=((0, 2),))
    everything = [
        Inventory(each, 5, ((0, each),), {(0, each): 1}, {(0, each): 1}, logged=((0, each),) if each < 2 else ())
        for each in range(3)
    ]
    program = make_plan(PlanInput(2, 4, fresh(grid), tuple(everything))).program
    assert [action.stage for line in program.values() for action in line if action.op is Op.REDUCE_GRAD] == [0, 2]


def test_who_has_not_stepped_yet_catches_up_first_and_its_values_are_of_the_step_before() -> None:
    ahead = Inventory(
        0, 5, ((0, 0),), {(0, 0): 1}, values=ValueRuns(_values(Kind.RESIDUAL, 0, 0) + _values(Kind.ACTIVATION, 0, 0))
    )
    behind = Inventory(1, 4, ((0, 1),), {(0, 1): 2}, {(0, 1): 2}, ((0, 1),), ValueRuns(_values(Kind.RESIDUAL, 1, 0, 1)))
    plan = make_plan(PlanInput(2, 4, fresh(Grid(2, 2)), (ahead, behind)))
    assert _compute(plan.program) == "0: 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1"


def test_replica_of_another_pipeline_is_adopted_and_none_at_all_is_a_lost_stage() -> None:
    grid = Grid(2, 1, pipelines=2)
    whole = (Inventory(0, 0, ((0, 0), (1, 0))), Inventory(3, 0, ((1, 1),)))
    plan = make_plan(PlanInput(2, -1, Ownership(grid, (0, 3, 0, 3)), whole))
    assert (plan.adopted, plan.lost_stages) == (((0, 1),), ())
    lost = make_plan(PlanInput(2, -1, Ownership(grid, (0, 0, 0, 3)), whole))
    assert (lost.program, lost.adopted, lost.lost_stages) == ({}, (), (1,))
    assert lost.digest != plan.digest


def test_shadow_without_a_whole_replica_is_healed_in_the_plan() -> None:
    ownership = Ownership(Grid(1, 1), (0,), shadows=((1,),))
    plan = make_plan(PlanInput(2, -1, ownership, (Inventory(0, 0, ((0, 0),)), Inventory(1, 0, ()))))
    assert drawn_program(plan.program) == plain(
        """
        0: 0HEAL 0F0 0B0 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
        1: 0HEAL 0LOG 0COMMIT 0STEP
        """
    )


@pytest.mark.parametrize(
    ("inventories", "rule"),
    [
        ((Inventory(0, 3, _BOTH),), "at step 3 while 4 is the last committed"),
        ((Inventory(0, 6, _BOTH),), "at step 6 while 4 is the last committed"),
        ((), "no inventory"),
        ((Inventory(1, 5, _BOTH), Inventory(0, 5, _BOTH)), "in order"),
        ((Inventory(0, 5, _BOTH), Inventory(0, 5, _BOTH)), "in order"),
        ((Inventory(0, 5, _BOTH, {(0, 0): 3}),), "more than 2"),
        ((Inventory(0, 5, _BOTH, added={(0, 0): -1}),), "more than 2"),
        ((Inventory(0, 5, _BOTH, added={(0, 2): 1}),), "holds what no step"),
        ((Inventory(0, 5, (*_BOTH, (1, 0))),), "holds what no step"),
        ((Inventory(0, 5, _BOTH, values=ValueRuns(_values(Kind.RESIDUAL, 0, 2))),), "holds what no step"),
        ((Inventory(0, 5, _BOTH, values=ValueRuns(_values(Kind.ACTIVATION, 2, 0))),), "holds what no step"),
    ],
)
def test_input_that_cannot_be_is_refused(inventories: tuple[Inventory, ...], rule: str) -> None:
    with pytest.raises(InvariantError, match=rule):
        make_plan(PlanInput(2, 4, _ONE_LEFT, inventories))


def test_plan_that_does_not_finish_its_own_dry_run_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that each wait for the other before they send: a pass with a bug would hang them."""

    def receives_first(*words: Any) -> Program:
        program = with_transfers(*words)
        return {
            worker: tuple(sorted(line, key=lambda each: each.op not in RECEIVE_OPS)) for worker, line in program.items()
        }

    whole = (Inventory(0, 5, ((0, 0),)), Inventory(1, 5, ((0, 1),)))
    given = PlanInput(2, 4, Ownership(Grid(2, 2), (0, 1)), whole)
    assert make_plan(given).program
    monkeypatch.setattr(recovery, "with_transfers", receives_first)
    with pytest.raises(ScheduleError, match="deadlock"):
        make_plan(given)


def _jobs(pipelines: int) -> list[Job]:
    policies: tuple[Redundancy, Redundancy] = ("lazy", "eager") if pipelines == 1 else ("lazy", "reroute")
    return [
        Job(Grid(stages, microbatches, pipelines), schedule, policy, retain=retain)
        for stages in (2, 3, 4)
        for microbatches in (2, 4)
        for schedule in ("gpipe", "1f1b")
        for policy, retain in ((policies[0], True), (policies[1], microbatches == 2))
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("pipelines", "every"), [(1, 3), (2, 9), soaked(1, 1), soaked(2, 1)])
def test_every_single_kill(pipelines: int, every: int) -> None:
    """Each worker after each `every`th of its actions: afterwards every replica is what it is without a fault."""
    done: Counter[Op] = Counter()
    number = 0
    for first, job in enumerate(_jobs(pipelines)):
        for failure in distinct_kills(job, every, first):
            number += 1
            assert_faultless(failure.finish(seeded(number)))
            done.update(action.op for line in failure.plan.program.values() for action in line)
    assert number > 900 * pipelines // every
    assert done[Op.REDO_F] and done[Op.I], "neither a forward nor a backward that counted had to be redone"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [250, pytest.param(7000, marks=pytest.mark.soak)])
def test_random_histories_of_several_failures(count: int) -> None:
    """Ties, pipelines, levels, steps, heals, failures during recovery, and failures in which nobody died."""
    survived = failures = 0
    for seed in range(count):
        order = seeded(seed)
        history = random_history(random_job(order), order)
        if history is not None:
            assert_faultless(history[0])
            survived += 1
            failures += len(history[1])
    assert survived > 0.4 * count and failures > 0.75 * count


@cache
def _some_failures() -> list[Failure]:
    histories = (random_history(random_job(order), order) for order in map(seeded, range(90)))
    return [failure for history in histories if history is not None for failure in history[1]]


def test_no_plan_has_an_action_that_it_could_leave_out() -> None:
    checked = 0
    for failure in _some_failures():
        program, ownership, held = failure.plan.program, failure.given.ownership, held_at_start(failure.given)
        for worker, actions in program.items():
            for position, action in enumerate(actions):
                if action.op in COMPUTE_OPS | SEND_OPS:
                    without = {**program, worker: actions[:position] + actions[position + 1 :]}
                    with pytest.raises(ScheduleError):
                        dry_run(without, ownership, held=held)
                    checked += 1
    assert checked > 1000


def test_nothing_that_is_held_is_made_again_but_to_count_it() -> None:
    for failure in _some_failures():
        held = held_at_start(failure.given)
        anywhere = {value for _, value in held}
        for worker, actions in failure.plan.program.items():
            for action in actions:
                made = {
                    kind: Value(kind, action.pipeline, action.stage, action.microbatch)
                    for kind in (Kind.ACTIVATION, Kind.RESIDUAL, Kind.GRADIENT)
                }
                if action.op is Op.REDO_F:
                    assert made[Kind.ACTIVATION] not in anywhere or (worker, made[Kind.RESIDUAL]) not in held
                if action.op is Op.I:
                    assert made[Kind.GRADIENT] not in anywhere
                if action.op in (Op.F, Op.B):
                    assert not _in_already(Kind.COUNTED if action.op is Op.F else Kind.ADDED, worker, action, held)


def _in_already(kind: Kind, worker: int, action: tuple[int, Op, int, int], held: tuple[Held, ...]) -> bool:
    stage, _, microbatch, pipeline = action
    return any(
        each[0] == worker and each[1][:3] == (kind, pipeline, stage) and each[1].index >= microbatch for each in held
    )


_DIGESTS = """
from tests.core.test_planner import _some_failures
print(*(failure.plan.digest for failure in _some_failures()))
"""


def test_digest_is_the_same_whatever_the_hash_seed() -> None:
    """Here with the seed of this process, there with another one."""
    digests = [each.plan.digest for each in _some_failures()]
    there = subprocess.run(
        [sys.executable, "-c", _DIGESTS],
        env={**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert there.split() == digests and len({*digests}) > 50


def test_digest_tells_plans_apart() -> None:
    failures = _some_failures()
    assert len({each.plan.digest for each in failures}) == len(
        {repr(replace(each.plan, digest="")) for each in failures}
    )


def _half_way(stages: int, microbatches: int, blocks: int = 1) -> PlanInput:
    """Returns what a plan is made from when a worker in the middle dies half-way through a step."""
    machine, order = Job(Grid(stages * blocks, microbatches, blocks=blocks)).machine(), seeded(0)
    machine.run(order, sum(map(len, machine.program.values())) // 2)
    failure = fail(machine, [stages // 2], order)
    assert failure is not None
    return failure.given


def _calls_to_plan(given: PlanInput) -> tuple[int, int]:
    """Returns how many functions are called to make a plan, and how many actions it has: both the same every time."""
    calls = [0]

    def note(frame: object, event: str, argument: object) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        plan = make_plan(given)
    finally:
        sys.setprofile(None)
    return calls[0], sum(map(len, plan.program.values()))


def test_plan_for_sixty_four_workers_takes_less_than_a_second() -> None:
    """Of the processor, at best of five; and the work grows no faster than n log n, counted in calls: no noise."""
    small, large = _half_way(16, 64), _half_way(64, 128)
    few_calls, few = _calls_to_plan(small)
    many_calls, many = _calls_to_plan(large)
    assert many > 8 * few
    assert many_calls / few_calls < (many * log2(many)) / (few * log2(few))
    taken = []
    gc.disable()  # what it takes depends on all else that the process holds
    try:
        for _ in range(5):
            start = time.process_time()
            make_plan(large)
            taken.append(time.process_time() - start)
    finally:
        gc.enable()
    assert min(taken) < 1.0


def test_a_plan_for_many_blocks_is_little_work() -> None:
    """32 blocks on 8 workers: some 20 ms of a processor, but time is noise, so calls are counted."""
    calls, num_actions = _calls_to_plan(_half_way(8, 32, blocks=4))
    assert num_actions > 1500
    assert calls < 150_000
