"""Handing: a worker that leaves inside a step sends its accumulators, and no backward is run again."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest

from engine.core.action import FORWARD_OPS, Action, Op
from engine.core.ownership import Grid, Ownership
from engine.core.program import planner as recovery
from engine.core.program.inventory import Inventory, ValueRuns
from engine.core.program.planner import PlanInput, make_plan
from engine.core.program.remaining_tasks import work_of
from engine.core.value import Kind, Value
from tests.core.drawing import drawn_program, plain
from tests.core.recovery_cases import Failure, Job, assert_faultless, fail, hand_overs, seeded
from tests.looped import looped

LEAVER, HEIR = 1, 0
_TWO = Ownership(Grid(2, 3), (HEIR, HEIR), ((LEAVER,), (LEAVER,)))
_SLOTS = ((0, 0), (0, 1))
JOBS = (
    Job(Grid(3, 4)),
    Job(Grid(3, 4), "gpipe"),
    Job(Grid(3, 4), redundancy="eager"),
    Job(Grid(3, 4), log_every=2),
    Job(Grid(4, 3, 1, ((0, 2),)), level=2, log_every=1),
    Job(Grid(2, 3, 2), redundancy="reroute"),
    Job(Grid(2, 3, 2), redundancy="none"),
)


def _values(kind: Kind, stage: int, *microbatches: int) -> tuple[Value, ...]:
    return tuple(Value(kind, 0, stage, each) for each in microbatches)


def test_the_leaver_sends_what_it_has_added_and_what_its_heir_lacks() -> None:
    """The leaver has added 0 and 1 of stage 1, sent the gradient of 0 only, and has microbatch 2 in flight."""
    heir = Inventory(
        *(HEIR, 5, _SLOTS, {(0, 0): 3}, {(0, 0): 1}),
        values=ValueRuns(_values(Kind.ACTIVATION, 0, 0, 1, 2) + _values(Kind.RESIDUAL, 0, 1, 2)),
    )
    kept = _values(Kind.GRADIENT, 1, 0, 1) + _values(Kind.RESIDUAL, 1, 2)
    leaver = Inventory(LEAVER, 5, _SLOTS, {(0, 1): 3}, {(0, 1): 2}, values=ValueRuns(kept))
    end = "0REDUCE_GRAD 1REDUCE_GRAD 0LOG 1LOG 0COMMIT 1COMMIT 0STEP 1STEP"
    assert drawn_program(make_plan(PlanInput(2, 4, _TWO, (heir, leaver))).program) == plain(
        f"""
        0: 1HAND1 0RECV_B1 0B1 1F2 1B2 0B2 {end}
        1: 1HAND1 1SEND_B1 0LOG 1LOG 0COMMIT 1COMMIT 0STEP 1STEP
        """
    )


def test_a_slot_whose_heir_has_added_as_much_is_not_handed_over() -> None:
    """A stream may have brought it all."""
    both = [Inventory(each, 5, _SLOTS, {(0, 1): 2}, {(0, 1): 2}) for each in (HEIR, LEAVER)]
    program = make_plan(PlanInput(2, 4, _TWO, tuple(both))).program
    assert not [each for line in program.values() for each in line if each.op is Op.HAND]


def test_a_worker_that_has_not_stepped_yet_hands_nothing_over() -> None:
    behind = Inventory(LEAVER, 4, _SLOTS, {(0, 1): 3}, {(0, 1): 3}, logged=_SLOTS)
    program = make_plan(PlanInput(2, 4, _TWO, (Inventory(HEIR, 5, _SLOTS), behind))).program
    assert not [each for line in program.values() for each in line if each.op is Op.HAND]


def redone(failure: Failure) -> Counter[Op]:
    """Returns the backwards of a plan that had been run before by any worker that is left."""
    step = failure.given.committed + 1
    added = {
        (*slot, each)
        for holder in failure.given.inventories
        if holder.step == step
        for slot, count in holder.added.items()
        for each in range(count)
    }
    actions = chain.from_iterable(failure.plan.program.values())
    return Counter(op for stage, op, microbatch, d in actions if op in (Op.B, Op.I) and (d, stage, microbatch) in added)


@looped("job", JOBS)
def test_no_backward_is_run_again_wherever_a_worker_leaves(job: Job) -> None:
    count = 0
    for failure in hand_overs(job):
        count += any(each.op is Op.HAND for line in failure.plan.program.values() for each in line)
        assert redone(failure) == Counter()
        assert_faultless(failure.finish(seeded(count)))
    assert count > 5


@looped("job", JOBS)
def test_no_work_is_run_again_wherever_a_worker_leaves_that_sends_its_residuals(job: Job) -> None:
    count = 0
    for number, failure in enumerate(hand_overs(replace(job, residuals="ship"))):
        actions = [each for line in failure.plan.program.values() for each in line]
        count += any(each.op is Op.SHIP for each in actions)
        assert redone(failure) == Counter()
        if job.redundancy != "eager":  # there a shadow may have run a forward before the owner
            step = failure.given.committed + 1
            ran = {
                Action(stage, Op.F, each, d)
                for held in failure.given.inventories
                for (d, stage), counted in (held.counted.items() if held.step == step else ())
                for each in range(counted)
            }
            again = [each for each in actions if each.op in FORWARD_OPS and work_of(each) in ran]
            assert not again, again
        assert_faultless(failure.finish(seeded(number)))
    assert count > 0


def _killed(failure: Failure, order: random.Random) -> bool:
    """Kills a worker at a random place of a hand-over, and runs the step to its end; returns if that could be done."""
    machine = failure.machine
    machine.enter([failure.plan.program], failure.given.ownership)
    machine.run(order, order.randint(0, sum(map(len, failure.plan.program.values()))))
    second = fail(machine, [order.choice(sorted(machine.bodies))], order)
    if second is None:
        return False
    assert_faultless(second.finish(order))
    return True


def test_a_death_at_any_moment_of_a_hand_over_changes_no_bit() -> None:
    count = 0
    for job in JOBS:
        for number, failure in enumerate(chain(hand_overs(job, 4), hand_overs(replace(job, residuals="ship"), 4))):
            count += _killed(failure, seeded(number))
    assert count > 100


def test_an_accumulator_that_is_sent_and_not_counted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verification of the plan refuses it: it adds microbatches again."""
    monkeypatch.setattr(recovery, "held_after", lambda held, hands: held)
    with pytest.raises(AssertionError):
        list(hand_overs(JOBS[0]))
