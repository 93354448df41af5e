"""Routes, read off programs: to whom a worker sends, and from whom it receives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.core.action import Program
from engine.core.ownership import Grid, Ownership, fresh
from engine.core.program.build import build_program, build_validation
from engine.core.program.dependencies import Routes, routes_of
from engine.core.value import Kind, Value
from tests.core.drawing import program_of
from tests.core.machine import drawn_by
from tests.core.random_programs import random_healing, random_ownership


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
