"""The happens-before rule, against a table: what each action needs and makes, as place:value."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.action import STAGE_OPS, WHOLE_STAGE, Action, Op, Program, parse_action
from engine.core.ownership import Grid, Ownership, fresh
from engine.core.program.build import build_program, build_validation
from engine.core.program.dependencies import (
    DependencyIndex,
    IndexedActions,
    Routes,
    Thing,
    makes,
    needs,
    rendezvous,
    routes_of,
)
from engine.core.program.verify import verify
from engine.core.value import WIRE, Held, Kind, Value
from tests.core.drawing import program_of
from tests.core.machine import drawn_by
from tests.core.random_programs import random_healing, random_ownership, random_program
from tests.looped import looped

THREE = fresh(Grid(3, 4))
TWO_PIPELINES = Ownership(Grid(2, 4, pipelines=2), (5, 4, 7, 6))
MERGED = Ownership(Grid(3, 4), (0, 1, 1))
BOTH_PIPELINES = Ownership(Grid(2, 4, pipelines=3), (0, 1, 2, 1, 4, 5))
TIED = fresh(Grid(4, 2, pipelines=2, ties=((0, 3), (0, 2))))
TIED_AT_ONE = Ownership(Grid(3, 2, ties=((0, 2),)), (0, 1, 0))
SHADOWED = Ownership(Grid(2, 4), (0, 1), ((1,), (0, 2)))


def drawn(held: tuple[Held, ...]) -> str:
    """Returns values at places as text: what, pipeline.stage, index."""
    words = []
    for place, (kind, pipeline, stage, index) in held:
        where = "wire" if place == WIRE else str(place)
        words.append(f"{where}:{kind}{pipeline}.{stage}" + ("" if index < 0 else f"/{index}"))
    return " ".join(words)


@looped(
    ("ownership", "worker", "action", "needed", "made"),
    [
        (THREE, 0, "0F0", "", "0:activation0.0/0 0:residual0.0/0 0:counted0.0/0"),
        (THREE, 0, "0F2", "0:counted0.0/1", "0:activation0.0/2 0:residual0.0/2 0:counted0.0/2"),
        (
            THREE,
            1,
            "1F2",
            "1:activation0.0/2 1:counted0.1/1",
            "1:activation0.1/2 1:residual0.1/2 1:counted0.1/2",
        ),
        (SHADOWED, 0, "1F0", "0:activation0.0/0", "0:activation0.1/0 0:residual0.1/0 0:counted0.1/0"),
        (THREE, 1, "1f2", "1:activation0.0/2", "1:activation0.1/2 1:residual0.1/2"),
        (THREE, 0, "0B0", "0:residual0.0/0 0:gradient0.1/0", "0:gradient0.0/0 0:added0.0/0"),
        (
            THREE,
            1,
            "1B2",
            "1:residual0.1/2 1:gradient0.2/2 1:added0.1/1",
            "1:gradient0.1/2 1:added0.1/2",
        ),
        (THREE, 2, "2B0", "2:residual0.2/0", "2:gradient0.2/0 2:added0.2/0"),
        (THREE, 1, "1I2", "1:residual0.1/2 1:gradient0.2/2", "1:gradient0.1/2 1:pending0.1/2"),
        (THREE, 1, "1W2", "1:pending0.1/2 1:added0.1/1", "1:added0.1/2"),
        (THREE, 1, "1W0", "1:pending0.1/0", "1:added0.1/0"),
        (THREE, 0, "0SEND_F1", "0:activation0.0/1", "wire:activation0.0/1"),
        (THREE, 1, "1RECV_F1", "wire:activation0.0/1", "1:activation0.0/1"),
        (THREE, 2, "2SEND_B1", "2:gradient0.2/1", "wire:gradient0.2/1"),
        (THREE, 1, "1RECV_B1", "wire:gradient0.2/1", "1:gradient0.2/1"),
        (TWO_PIPELINES, 6, "1RECV_F0@1", "wire:activation1.0/0", "6:activation1.0/0"),
        (MERGED, 1, "2F0", "1:activation0.1/0", "1:activation0.2/0 1:residual0.2/0 1:counted0.2/0"),
        (THREE, 1, "1REDUCE_GRAD", "1:added0.1/3 1:counted0.1/3", "1:reduced0.1 wire:reduced0.1"),
        (
            BOTH_PIPELINES,
            1,
            "1REDUCE_GRAD",
            "1:added0.1/3 1:counted0.1/3 1:added1.1/3 1:counted1.1/3",
            "1:reduced0.1 wire:reduced0.1 1:reduced1.1 wire:reduced1.1",
        ),
        (THREE, 1, "1LOG", "1:reduced0.1", "1:logged0.1 wire:logged0.1"),
        (TIED, 0, "0LOG", "0:reduced0.0 wire:reduced0.2 wire:reduced0.3", "0:logged0.0 wire:logged0.0"),
        (TIED, 7, "3LOG@1", "7:reduced1.3 wire:reduced1.0", "7:logged1.3 wire:logged1.3"),
        (TIED_AT_ONE, 0, "2LOG", "0:reduced0.2 0:reduced0.0", "0:logged0.2 wire:logged0.2"),
        (SHADOWED, 2, "1LOG", "wire:logged0.1", "2:logged0.1"),
        (SHADOWED, 1, "1HEAL", "", "wire:state0.1"),
        (SHADOWED, 2, "1HEAL", "wire:state0.1", "2:state0.1"),
        (THREE, 1, "1COMMIT", "1:logged0.1", "wire:voted0.1/1"),
        (SHADOWED, 2, "1COMMIT", "2:logged0.1", "wire:voted0.1/2"),
        (THREE, 1, "1STEP", "wire:voted0.0/0 wire:voted0.1/1 wire:voted0.2/2", ""),
        (SHADOWED, 2, "1STEP", "wire:voted0.0/0 wire:voted0.0/1 wire:voted0.1/1 wire:voted0.1/0 wire:voted0.1/2", ""),
    ],
)
def test_needs_and_makes(ownership: Ownership, worker: int, action: str, needed: str, made: str) -> None:
    assert drawn(needs(parse_action(action), worker, ownership)) == needed
    assert drawn(makes(parse_action(action), worker, ownership)) == made


def test_the_reduction_meets_its_stage_in_the_other_pipelines() -> None:
    ownership = fresh(Grid(2, 1, pipelines=3))
    meets = ((1, parse_action("1REDUCE_GRAD")), (5, parse_action("1REDUCE_GRAD@2")))
    assert rendezvous(parse_action("1REDUCE_GRAD@1"), 3, ownership) == meets
    assert rendezvous(parse_action("1REDUCE_GRAD"), 1, THREE) == ()


def test_a_worker_with_a_stage_in_two_pipelines_is_met_once() -> None:
    meets = ((1, parse_action("1REDUCE_GRAD")),)
    assert rendezvous(parse_action("1REDUCE_GRAD@2"), 5, BOTH_PIPELINES) == meets
    assert rendezvous(parse_action("1REDUCE_GRAD"), 1, BOTH_PIPELINES) == ((5, parse_action("1REDUCE_GRAD@2")),)


def test_owners_of_a_stage_put_its_shards_together_together() -> None:
    assert rendezvous(parse_action("1UNSHARD"), 1, BOTH_PIPELINES) == ((5, parse_action("1UNSHARD@2")),)


@looped("op", [op for op in Op if op not in (Op.REDUCE_GRAD, Op.UNSHARD)])
def test_nothing_else_meets(op: Op) -> None:
    text = f"0{op.value}" if op in STAGE_OPS else f"0{op.value}0"
    assert rendezvous(parse_action(text), 5, TWO_PIPELINES) == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Value(Kind.ACTIVATION, 0, 2, 3), "activation of stage 2 microbatch 3"),
        (Value(Kind.GRADIENT, 1, 0, 0), "gradient of stage 0 microbatch 0 pipeline 1"),
        (Value(Kind.REDUCED, 0, 4), "reduced of stage 4"),
        (Value(Kind.VOTED, 2, 4, 7), "voted of stage 4 worker 7 pipeline 2"),
    ],
)
def test_a_value_as_text(value: Value, text: str) -> None:
    assert str(value) == text


# The rule in numbers says what the rule says, of every action of every worker; and walks with it are fast.


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


@looped("op", Op)
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


def test_numbers_grow_with_the_workers_and_not_with_their_square() -> None:
    lengths = []
    for workers in (32, 128):
        grid = Grid(workers, 2)
        ownership = Ownership(grid, tuple(range(workers)), tuple(((each + 1) % workers,) for each in range(workers)))
        program = build_program("1f1b", ownership, "lazy")
        numbers = DependencyIndex(program, ownership)
        for worker, actions in program.items():
            for action in actions:
                numbers.line(action, worker)
        lengths.append(len(numbers))
    assert lengths[1] < 5 * lengths[0]


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


# Routes, read off programs: to whom a worker sends, and from whom it receives.


def test_neighbours_send_to_each_other() -> None:
    ownership = fresh(Grid(3, 1))
    program = build_program("1f1b", ownership)
    assert routes_of(1, program, ownership) == Routes(
        {
            Value(Kind.ACTIVATION, 0, 1, 0): (2,),
            Value(Kind.GRADIENT, 0, 1, 0): (0,),
            Value(Kind.REDUCED, 0, 1): (),
            Value(Kind.LOGGED, 0, 1): (),
        },
        {Value(Kind.ACTIVATION, 0, 0, 0): 0, Value(Kind.GRADIENT, 0, 2, 0): 2},
    )


def test_what_is_logged_goes_to_every_shadow_and_a_state_to_the_new_ones() -> None:
    ownership = Ownership(Grid(2, 1), (4, 6), ((6, 5), (4,)))
    program = build_program("1f1b", ownership, healing={(5, (0, 0))})
    routes = routes_of(4, program, ownership)
    assert routes.targets[Value(Kind.LOGGED, 0, 0)] == (5, 6)
    assert routes.targets[Value(Kind.STATE, 0, 0)] == (5,)
    assert routes.sources == {Value(Kind.GRADIENT, 0, 1, 0): 6, Value(Kind.LOGGED, 0, 1): 6}
    assert routes_of(5, program, ownership) == Routes({}, {Value(Kind.STATE, 0, 0): 4, Value(Kind.LOGGED, 0, 0): 4})


def test_reduced_gradients_go_to_the_tied_stages_of_other_workers() -> None:
    ownership = Ownership(Grid(3, 1, ties=((0, 1, 2),)), (0, 1, 0))
    program = build_program("1f1b", ownership)
    assert routes_of(1, program, ownership).targets[Value(Kind.REDUCED, 0, 1)] == (0,)
    routes = routes_of(0, program, ownership)
    assert routes.targets[Value(Kind.REDUCED, 0, 0)] == routes.targets[Value(Kind.REDUCED, 0, 2)] == (1,)
    assert routes.sources[Value(Kind.REDUCED, 0, 1)] == 1
    assert Value(Kind.REDUCED, 0, 2) not in routes.sources


def test_anybody_sends_what_a_program_says() -> None:
    ownership = fresh(Grid(4, 2))
    program = program_of("0: 0SEND_F1\n1: 2SEND_B0\n2: 1RECV_B0\n3: 1RECV_F1 1RECV_B0")
    activation, gradient = Value(Kind.ACTIVATION, 0, 0, 1), Value(Kind.GRADIENT, 0, 2, 0)
    assert routes_of(0, program, ownership) == Routes({activation: (3,)}, {})
    assert routes_of(1, program, ownership) == Routes({gradient: (2, 3)}, {})
    assert routes_of(2, program, ownership) == Routes({}, {gradient: 1})
    assert routes_of(3, program, ownership) == Routes({}, {activation: 0, gradient: 1})


def test_in_a_validation_pass_activations_alone_are_sent() -> None:
    ownership = fresh(Grid(2, 2, pipelines=2))
    routes = [routes_of(worker, build_validation(ownership), ownership) for worker in range(4)]
    sent = [Value(Kind.ACTIVATION, 0, 0, each) for each in range(2)]
    assert routes == [Routes(dict.fromkeys(sent, (1,))), Routes({}, dict.fromkeys(sent, 0)), Routes(), Routes()]


@given(st.integers(0, 2**32), st.sampled_from(("lazy", "eager")))
def test_who_sends_and_who_receives_agree(seed: int, redundancy: str) -> None:
    order = drawn_by(seed)
    ownership = random_ownership(order)
    program: Program = build_program(
        "1f1b", ownership, "eager" if redundancy == "eager" else "lazy", random_healing(ownership, order)
    )
    routes = {worker: routes_of(worker, program, ownership) for worker in program}
    sent = {
        (sender, target, value)
        for sender, each in routes.items()
        for value, targets in each.targets.items()
        for target in targets
    }
    taken = {(source, worker, value) for worker, each in routes.items() for value, source in each.sources.items()}
    assert sent == taken
    assert all(sender != target for sender, target, _ in sent)
