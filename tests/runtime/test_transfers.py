"""Which transfer is which: keys that never meet, and receives that are posted ahead in the order of sending."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from engine.core.action import SEND_OPS, Program
from engine.core.errors import InvariantError
from engine.core.ownership import Grid, Ownership, fresh
from engine.core.program.build import build_program, build_validation
from engine.core.program.dependencies import carried, routes_of
from engine.core.program.schedules import SCHEDULES
from engine.core.value import Kind, Value
from engine.models.layers import Tensors
from engine.runtime.transport.transfers import Receive, Receiver, receives_of
from engine.runtime.transport.transport import (
    AsideKey,
    AsidePurpose,
    Border,
    ProgramKey,
    ProgramPurpose,
    TensorSpec,
    aside_key,
    carrier_key,
    program_key,
    validation_key,
)
from tests.looped import looped
from tests.runtime.peers import an_order


def spec(*shape: int, grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, torch.float32, grad)


BORDERS: list[Border] = [(spec(4, 2), spec(4, grad=False)), (spec(4, 3),), (spec(4, 4),)]


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(4, 8, pipelines=3), Grid(3, 130, pipelines=2)])
def test_no_two_transfers_of_a_step_have_one_key(grid: Grid) -> None:
    keys: list[int] = []
    for slot, index in itertools.product(grid.slots(), range(grid.microbatches + 64)):
        keys += [program_key(grid, purpose, *slot, index).number for purpose in ProgramPurpose]
        keys += [aside_key(grid, purpose, *slot, index).number for purpose in AsidePurpose]
    assert len(set(keys)) == len(keys)
    assert min(keys) >= 0


def test_an_index_beyond_its_range_is_a_bug() -> None:
    with pytest.raises(InvariantError):
        program_key(Grid(2, 4), ProgramPurpose.TIE, 0, 0, 4 + 64)


@looped("schedule", SCHEDULES)
@looped("owners", [(4, 2, 0, 1, 5, 3), (4, 2, 4, 1, 2, 3)])
def test_receiver_and_sender_agree_on_order_keys_and_shapes(schedule: str, owners: tuple[int, ...]) -> None:
    ownership = Ownership(Grid(3, 5, pipelines=2), owners)
    program = build_program(schedule, ownership)
    sent: dict[tuple[int, int], list[ProgramKey]] = {}
    received: dict[tuple[int, int], list[ProgramKey]] = {}
    for worker, actions in program.items():
        routes = routes_of(worker, program, ownership)
        for action in actions:
            if action.op in SEND_OPS:
                for target in routes.targets[carried(action)]:
                    sent.setdefault((worker, target), []).append(carrier_key(ownership.grid, action))
        for receive in receives_of(actions, routes, BORDERS, partial(carrier_key, ownership.grid)):
            received.setdefault((receive.source, worker), []).append(receive.key)
    assert received == sent
    assert all(len(set(keys)) == len(keys) for keys in sent.values())


def receives(program: Program, worker: int, ownership: Ownership) -> list[Receive[ProgramKey]]:
    routes = routes_of(worker, program, ownership)
    return receives_of(program[worker], routes, BORDERS, partial(carrier_key, ownership.grid))


def test_forward_carries_the_border_and_backward_the_gradients_that_it_needs() -> None:
    ownership = fresh(Grid(2, 1))
    program = build_program("1f1b", ownership)
    (forward,) = receives(program, 1, ownership)
    (backward,) = receives(program, 0, ownership)
    assert forward.value == Value(Kind.ACTIVATION, 0, 0, 0)
    assert forward.border == BORDERS[0]
    assert backward.value == Value(Kind.GRADIENT, 0, 1, 0)
    assert backward.border == (spec(4, 2, grad=False),)


def test_validation_has_keys_of_its_own() -> None:
    ownership = fresh(Grid(2, 3))
    program = build_validation(ownership)
    key_of = partial(validation_key, ownership.grid)
    validation: list[Receive[AsideKey]] = receives_of(program[1], routes_of(1, program, ownership), BORDERS, key_of)
    training = receives(build_program("1f1b", ownership), 1, ownership)
    assert len(validation) == len(training) == 3
    assert not {each.key.number for each in validation} & {each.key.number for each in training}


class Posts:
    """Notes what is posted and hands out zeros; of what is posted, `arrived` says what need not be waited for."""

    def __init__(self, arrived: bool) -> None:
        self.arrived = arrived
        self.posted: list[tuple[int, ProgramKey]] = []
        self.taken: list[tuple[int, ProgramKey]] = []

    def post(self, source: int, key: ProgramKey, border: Border) -> None:
        self.posted.append((source, key))

    def has_arrived(self, source: int, key: ProgramKey) -> bool:
        return self.arrived and (source, key) in self.posted

    def take_arrived(self, source: int, key: ProgramKey) -> Tensors | None:
        return self.take(source, key) if self.has_arrived(source, key) else None

    def take(self, source: int, key: ProgramKey) -> Tensors:
        assert (source, key) in self.posted
        self.taken.append((source, key))
        return tuple(torch.zeros(1) for _ in range(2))


VALUES = [Value(Kind.ACTIVATION, 0, 0, key) for key in range(9)]
RECEIVES = [Receive(VALUES[key], key % 2, an_order(key), (spec(1), spec(1, grad=False))) for key in range(9)]


def test_receives_are_posted_a_few_ahead_of_use_and_in_order() -> None:
    plane: Any = Posts(arrived=False)
    receiver = Receiver(plane, RECEIVES)
    assert plane.posted == []
    receiver.begin()
    receiver.begin()
    num_ahead = len(plane.posted)
    assert 1 < num_ahead < 9
    for number in range(9):
        value, tensors = receiver.take()
        assert value == VALUES[number]
        assert plane.posted == [(each.source, each.key) for each in RECEIVES[: number + num_ahead]]
        assert plane.taken[-1] == (number % 2, an_order(number))
        assert [tensor.requires_grad for tensor in tensors] == [True, False]
    assert len(plane.posted) == 9


def test_a_worker_that_never_waits_posts_behind_its_sends_before_too_few_are_posted() -> None:
    """As in eager-1F1B: each message has arrived when it is taken, and a send follows each other one."""
    plane: Any = Posts(arrived=True)
    receiver = Receiver(plane, RECEIVES)
    receiver.begin()
    for number in range(9):
        assert not receiver.must_wait(), "it was posted before its sender had sent it"
        receiver.take()
        if number % 2:
            receiver.begin()
            assert len(plane.posted) >= min(9, number + 1 + 2), "one of either direction"


def test_nothing_is_posted_while_there_is_no_time_for_it() -> None:
    plane: Any = Posts(arrived=True)
    receiver = Receiver(plane, RECEIVES)
    receiver.begin()
    num_ahead = len(plane.posted)
    for _ in range(num_ahead):
        receiver.take()
        assert len(plane.posted) == num_ahead
    assert receiver.must_wait()
    receiver.take()
    assert len(plane.posted) == min(9, 2 * num_ahead)


def test_a_program_without_receives_posts_nothing() -> None:
    plane: Any = Posts(arrived=False)
    Receiver(plane, []).begin()
    assert plane.posted == []
