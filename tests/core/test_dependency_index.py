"""The rule in numbers says what the rule says, of every action of every worker; and walks with it are fast."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from engine.core.action import STAGE_OPS, WHOLE_STAGE, Action, Op, Program
from engine.core.ownership import Grid, Ownership, fresh
from engine.core.program.build import build_program
from engine.core.program.dependencies import DependencyIndex, IndexedActions, Thing, makes, needs, rendezvous
from engine.core.program.verify import verify
from tests.core.machine import drawn_by
from tests.core.random_programs import random_healing, random_ownership, random_program


def things(numbers: DependencyIndex, line: tuple[int, ...], action: Action) -> list[Thing]:
    return [numbers.thing(number + action.microbatch) for number in line]


def compare(numbers: DependencyIndex, line: IndexedActions, action: Action, worker: int, ownership: Ownership) -> None:
    assert things(numbers, line.needs, action) == [*needs(action, worker, ownership)]
    assert things(numbers, line.makes, action) == [*makes(action, worker, ownership)]
    assert things(numbers, line.meets, action) == [*rendezvous(action, worker, ownership)]
    assert things(numbers, line.begins, action) == ([(worker, action)] if line.meets else [])


def line_of(numbers: DependencyIndex, action: Action, worker: int) -> IndexedActions:
    """Returns what a walk would use: the line of another microbatch, unless it is the first or there is none."""
    return numbers.line(action._replace(microbatch=min(action.microbatch, 1)), worker)


def test_of_random_programs() -> None:
    order = drawn_by(5)
    seen: set[Op] = set()
    for _ in range(200):
        ownership = random_ownership(order)
        program = random_program(ownership, order, random_healing(ownership, order))
        numbers = DependencyIndex(program, ownership)
        for worker, actions in program.items():
            for action in actions:
                compare(numbers, line_of(numbers, action, worker), action, worker, ownership)
                seen.add(action.op)
    assert {Op.F, Op.B, Op.SEND_F, Op.RECV_B, Op.HEAL, Op.REDUCE_GRAD, Op.LOG, Op.COMMIT, Op.STEP} <= seen


@pytest.mark.parametrize("op", Op)
def test_of_every_op(op: Op) -> None:
    order = drawn_by(6)
    for _ in range(50):
        ownership = random_ownership(order)
        grid, numbers = ownership.grid, DependencyIndex({}, ownership)
        for pipeline, stage in grid.slots():
            for worker in ownership.replicas(pipeline, stage):
                for microbatch in (WHOLE_STAGE,) if op in STAGE_OPS else range(grid.microbatches):
                    action = Action(stage, op, microbatch, pipeline)
                    compare(numbers, line_of(numbers, action, worker), action, worker, ownership)


def test_no_two_things_have_one_number() -> None:
    order, found = drawn_by(7), 0
    for _ in range(50):
        ownership = random_ownership(order)
        program = random_program(ownership, order)
        numbers = DependencyIndex(program, ownership)
        seen: dict[int, Thing] = {}
        for worker, actions in program.items():
            for action in actions:
                found_here: list[Thing] = [*needs(action, worker, ownership), *makes(action, worker, ownership)]
                for thing in (*found_here, (worker, action)):
                    assert seen.setdefault(numbers.of(thing), thing) == thing
                    assert numbers.of(thing) < len(numbers)
                    found += 1
    assert found > 1000


def cpu_seconds(work: Callable[[], object]) -> float:
    """Returns the least that a call took of three, in seconds of the processor."""
    found = []
    for _ in range(3):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def test_making_and_verifying_a_program_takes_little_more_than_writing_it_down() -> None:
    """Against making as many actions, so that a slow machine does not matter; 9 times here, 80 without numbers."""
    ownership = fresh(Grid(64, 128), 4)

    def make_and_verify() -> Program:
        program = build_program("interleaved", ownership)
        assert verify(program, ownership) == ()
        return program

    num_actions = sum(map(len, make_and_verify().values()))
    assert num_actions > 48_000
    written = cpu_seconds(lambda: [Action(number % 64, Op.F, number % 128) for number in range(num_actions)])
    assert cpu_seconds(make_and_verify) < 20 * written
