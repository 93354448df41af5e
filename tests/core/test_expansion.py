"""Expansion: what is random becomes concrete before the run, the same for the same seed, and fair."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.core.faults.expansion import describe, expand
from engine.core.faults.fault import After, At, Fault, Owner, Role, Worker
from engine.core.faults.scenario import Every
from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from tests.core.scenario_cases import JOB, at, scenario, wanted

MOMENT = at(5, "2B3@1")


def victims(**target: Any) -> tuple[object, ...]:
    (fault,) = expand(scenario(wanted("a", MOMENT, **target)), 0)
    assert fault.moment == MOMENT
    return fault.victims


def test_a_target_becomes_victims() -> None:
    assert victims() == (Owner(1, 2),)
    assert victims(worker=3) == (Worker(3),)
    assert victims(role="shadow") == (Role("shadow"),)
    assert victims(pipeline=0, stage=1) == (Owner(0, 1),)
    assert victims(count=3, adjacent=True) == (Owner(1, 2), Owner(1, 3), Owner(1, 0))
    assert victims(pipeline=0, stage=3, count=2, adjacent=True) == (Owner(0, 3), Owner(0, 0))


def test_after_a_fault_the_recoverer_is_meant() -> None:
    _, fault = expand(scenario(wanted("a", MOMENT), wanted("b", After("a", "plan"))), 0)
    assert (fault.moment, fault.victims) == (After("a", "plan"), (Role("recoverer"),))
    _, fault = expand(scenario(wanted("a", MOMENT), wanted("b", After("a", "plan"), role="random")), 0)
    assert isinstance(fault.victims[0], Owner)


@settings(max_examples=60)
@given(st.integers(0, 2**40), st.integers(2, 4), st.sampled_from([True, False, None]))
def test_victims_at_once_are_different_and_as_near_as_asked(seed: int, count: int, adjacent: bool | None) -> None:
    (fault,) = expand(scenario(wanted("a", MOMENT, role="random", count=count, adjacent=adjacent)), seed)
    slots = [(each.pipeline, each.stage) for each in fault.victims if isinstance(each, Owner)]
    assert len(set(slots)) == len(slots) == count
    near = [
        (one, other)
        for one in slots
        for other in slots
        if one[0] == other[0] and (one[1] - other[1]) % JOB.stages in (1, JOB.stages - 1)
    ]
    if adjacent:
        assert len({pipeline for pipeline, _ in slots}) == 1 and near
    if adjacent is False:
        assert near == []


def test_no_room_for_victims_that_are_not_adjacent() -> None:
    job = Job(stages=3, steps=12)
    with pytest.raises(UserError) as caught:
        expand(scenario(wanted("a", at(5, "2B3"), count=2, adjacent=False), job=job), 0)
    assert str(caught.value) == (
        "faults.0.target.count: expected a grid with room for 2 victims that are not adjacent, found 1 x 3 slots"
    )


def drawn(seed: int, mtbf: float = 3, count: int = 4, job: Job = JOB) -> tuple[Fault, ...]:
    return expand(scenario(wanted("many", Every(mtbf, count), role="random"), job=job), seed)


@settings(max_examples=100)
@given(st.integers(0, 2**40))
def test_random_faults_come_in_order_at_actions_that_their_victims_run(seed: int) -> None:
    try:
        faults = drawn(seed)
    except UserError:
        return  # none in time, which is told
    assert faults == drawn(seed)
    assert [each.id for each in faults] == [f"many-{number}" for number in range(1, len(faults) + 1)]
    program, ownership = initial_program(JOB)
    steps = []
    for fault in faults:
        assert isinstance(fault.moment, At)
        action = fault.moment.action
        assert fault.victims == (Owner(action.pipeline, action.stage),)
        assert action in program[ownership.owner(action.pipeline, action.stage)]
        steps.append(fault.moment.step)
    assert steps == sorted(steps) and steps[-1] < JOB.steps
    assert len({each.moment for each in faults}) == len(faults)


def test_another_seed_makes_other_faults() -> None:
    job = replace(JOB, steps=1000)
    assert len({drawn(seed, job=job) for seed in range(20)}) == 20


def test_what_is_drawn_for_one_fault_does_not_depend_on_the_others() -> None:
    every = wanted("many", Every(3, 4))
    job = replace(JOB, steps=1000)
    alone = expand(scenario(every, job=job), 7)
    assert expand(scenario(wanted("first", at(900, "0F0")), every, job=job), 7)[1:] == alone


def test_every_slot_is_struck_as_often_and_the_gaps_have_their_mean() -> None:
    """Stage 0, the last stage and worker 0 are victims like all others."""
    job = replace(JOB, steps=100_000)
    faults = drawn(1, mtbf=20, count=4000, job=job)
    assert len(faults) == 4000
    struck = Counter(each.victims[0] for each in faults)
    assert len(struck) == 8
    # 500 each on average, with a standard deviation of 21.
    assert all(400 < number < 600 for number in struck.values()), struck
    last = faults[-1].moment
    assert isinstance(last, At)
    assert 18.5 < last.step / len(faults) < 21.5
    ops = Counter(each.moment.action.op for each in faults if isinstance(each.moment, At))
    assert {str(op) for op in ops} == {"F", "B", "LOG", "COMMIT", "STEP"}


def test_no_moment_is_drawn_twice_even_where_there_are_few() -> None:
    job = Job(stages=1, pipelines=1, microbatches=1, steps=1)
    faults = drawn(3, mtbf=0.01, count=100, job=job)
    assert sorted(str(each.moment) for each in faults) == [
        f"before 0{action} of step 0" for action in ("B0", "COMMIT", "F0", "LOG", "STEP")
    ]


def test_a_scenario_in_which_nothing_would_happen_is_refused() -> None:
    with pytest.raises(UserError, match=r"faults.0.every: expected a fault in the 12 steps of the job, found none"):
        drawn(0, mtbf=100_000, count=1)


def test_the_faults_are_told_exactly() -> None:
    case = scenario(
        wanted("a", MOMENT, count=2, adjacent=True),
        wanted("b", After("a", "plan", 1_000_000)),
        wanted("c", at(2, "0F0"), worker=3),
    )
    assert describe(expand(case, 0), JOB) == [
        "a: kill the owner of stage 2 of pipeline 1 and the owner of stage 3 of pipeline 1 before 2B3@1 of step 5; "
        "worker 6 and worker 7, unless the stages have moved",
        "b: kill the recoverer 1ms after the phase plan of the recovery from a",
        "c: kill worker 3 before 0F0 of step 2",
    ]
