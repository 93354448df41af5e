"""Verification accepts what executes and rejects every corruption, with worker, position, action and rule."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.action import RECEIVE_OPS, Action, Op
from engine.core.ownership import Grid, Ownership, one_slot_each
from engine.core.program import Program, build_program
from engine.core.requires import requires
from engine.core.schedule import SCHEDULES
from engine.core.verify import Violation, verify
from tests.core.drawing import program_of
from tests.core.machine import Machine, drawn_by, random_program

NUM_GENERATED = 2000


def random_ownership(order: random.Random) -> Ownership:
    """Returns a small job in which a worker may own several stages of its pipeline."""
    num_stages, num_pipelines = order.randint(1, 4), order.choice((1, 1, 1, 2))
    grid = Grid(num_stages, order.randint(1, 3), num_pipelines)
    owners = [
        pipeline * num_stages + order.randrange(num_stages)
        for pipeline in range(num_pipelines)
        for _ in range(num_stages)
    ]
    return Ownership(grid, tuple(owners))


def test_thousands_of_generated_programs_are_accepted() -> None:
    order = drawn_by(1)
    orders_seen = set()
    for _ in range(NUM_GENERATED):
        ownership = random_ownership(order)
        program = random_program(ownership, order)
        assert verify(program, ownership) == ()
        orders_seen.add(tuple(program.items()))
    assert len(orders_seen) > NUM_GENERATED / 2


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(4, 8), Grid(5, 2, pipelines=2), Grid(3, 3, ties=((0, 2),))])
def test_schedules_are_accepted(schedule: str, grid: Grid) -> None:
    ownership = one_slot_each(grid)
    assert verify(build_program(schedule, ownership), ownership) == ()


@st.composite
def valid(draw: st.DrawFn) -> tuple[dict[int, list[Action]], Ownership]:
    """A valid program of at least two workers, of a schedule or in random order."""
    num_stages, num_pipelines = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    num_stages += num_stages * num_pipelines == 1
    grid = Grid(num_stages, draw(st.integers(1, 4)), num_pipelines)
    ownership = Ownership(grid, tuple(draw(st.permutations(range(num_stages * num_pipelines)))))
    schedule = draw(st.sampled_from([*sorted(SCHEDULES), ""]))
    program = (
        build_program(schedule, ownership)
        if schedule
        else random_program(ownership, drawn_by(draw(st.integers(0, 2**32))))
    )
    return {worker: list(actions) for worker, actions in program.items()}, ownership


def frozen(program: dict[int, list[Action]]) -> Program:
    """Returns the program as verification takes it."""
    return {worker: tuple(actions) for worker, actions in program.items()}


def place(data: st.DataObject, program: dict[int, list[Action]]) -> tuple[int, int]:
    """Draws a worker and a position."""
    worker = data.draw(st.sampled_from(sorted(program)))
    return worker, data.draw(st.integers(0, len(program[worker]) - 1))


@given(st.data())
def test_a_dropped_action_is_missing(data: st.DataObject) -> None:
    program, ownership = data.draw(valid())
    worker, position = place(data, program)
    dropped = program[worker].pop(position)
    assert verify(frozen(program), ownership) == (Violation(worker, -1, str(dropped), "is missing"),)


@given(st.data())
def test_a_doubled_action_stands_twice(data: st.DataObject) -> None:
    program, ownership = data.draw(valid())
    worker, position = place(data, program)
    action = program[worker][position]
    again = data.draw(st.integers(0, len(program[worker])))
    program[worker].insert(again, action)
    second = max(again, position + (again <= position))
    assert verify(frozen(program), ownership) == (Violation(worker, second, str(action), "stands twice"),)


@given(st.data())
def test_an_action_on_another_worker_belongs_to_its_owner(data: st.DataObject) -> None:
    program, ownership = data.draw(valid())
    worker, position = place(data, program)
    thief = data.draw(st.sampled_from(sorted(set(program) - {worker})))
    to = data.draw(st.integers(0, len(program[thief])))
    action = program[worker].pop(position)
    program[thief].insert(to, action)
    rule = f"belongs to worker {worker}, the owner of its slot"
    assert verify(frozen(program), ownership) == (Violation(thief, to, str(action), rule),)


@given(st.data())
def test_two_workers_that_swap_everything_own_nothing_of_it(data: st.DataObject) -> None:
    program, ownership = data.draw(valid())
    one, other = data.draw(st.permutations(sorted(program)))[:2]
    program[one], program[other] = program[other], program[one]
    violations = verify(frozen(program), ownership)
    assert len(violations) == len(program[one]) + len(program[other])
    assert {violation.worker for violation in violations} == {one, other}


@given(st.data())
def test_an_action_swapped_with_one_that_it_requires_is_named(data: st.DataObject) -> None:
    program, ownership = data.draw(valid())
    pairs = [
        (worker, position, actions.index(need))
        for worker, actions in program.items()
        for position, action in enumerate(actions)
        for where, need in requires(action, worker, ownership)
        if where == worker
    ]
    worker, later, earlier = data.draw(st.sampled_from(sorted(pairs)))
    actions = program[worker]
    first, second = actions[earlier], actions[later]
    actions[earlier], actions[later] = second, first
    rule = f"stands before {first}, which it requires"
    assert Violation(worker, earlier, str(second), rule) in verify(frozen(program), ownership)


def transfers_of_pair(program: dict[int, list[Action]], ownership: Ownership) -> list[tuple[int, int, int]]:
    """Returns (worker, position, position) of two receives of one worker from another."""
    return [
        (worker, first, second)
        for worker, actions in program.items()
        for second, later in enumerate(actions)
        for first, sooner in enumerate(actions[:second])
        if sooner.op in RECEIVE_OPS
        and later.op in RECEIVE_OPS
        and requires(sooner, worker, ownership)[0][0] == requires(later, worker, ownership)[0][0]
    ]


@given(st.data())
def test_crossed_transfers_are_named(data: st.DataObject) -> None:
    program, ownership = data.draw(valid().filter(lambda case: transfers_of_pair(*case)))
    # Everything is made before anything is used, so that the order of transfers is all that is wrong.
    ranks = {op: rank for rank, op in enumerate((Op.RECV_F, Op.F, Op.SEND_F, Op.RECV_B, Op.B, Op.SEND_B))}
    for actions in program.values():
        actions.sort(key=lambda action: ranks.get(action.op, len(ranks)))
    assert verify(frozen(program), ownership) == ()
    worker, first, second = data.draw(st.sampled_from(transfers_of_pair(program, ownership)))
    actions = program[worker]
    sender = requires(actions[first], worker, ownership)[0][0]
    actions[first], actions[second] = actions[second], actions[first]
    violations = verify(frozen(program), ownership)
    assert violations
    for violation in violations:
        assert violation.worker == worker
        assert first < violation.position <= second
        assert violation.action == str(actions[violation.position])
        assert violation.rule == f"crosses an earlier send of worker {sender}"


def test_crossed_sends_are_named_where_they_are_received() -> None:
    program = program_of(
        """
        0: 0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0COMMIT 0STEP
        1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1COMMIT 1STEP
        """
    )
    (violation,) = verify(program, one_slot_each(Grid(2, 2)))
    assert str(violation) == "worker 1, position 4: 1RECV_F1: crosses an earlier send of worker 0"


def test_a_deadlock_is_named_by_its_cycle() -> None:
    program = program_of(
        """
        0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0COMMIT 0STEP
        1: 1RECV_F0 1F0 1RECV_B0 1B0 1SEND_B0 1SEND_F0 1REDUCE_GRAD 1COMMIT 1STEP
        2: 2RECV_F0 2F0 2B0 2SEND_B0 2REDUCE_GRAD 2COMMIT 2STEP
        """
    )
    (violation,) = verify(program, one_slot_each(Grid(3, 1)))
    assert violation == Violation(
        1,
        2,
        "1RECV_B0",
        "deadlock: worker 1: 1RECV_B0 -> worker 2: 2RECV_F0 -> worker 1: 1RECV_B0",
    )


@settings(max_examples=200)
@given(valid(), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)), max_size=4), st.data())
def test_exactly_what_executes_is_accepted(
    case: tuple[dict[int, list[Action]], Ownership], moves: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    program, ownership = case
    for which, source, target in moves:
        actions = program[sorted(program)[which % len(program)]]
        actions.insert(target % len(actions), actions.pop(source % len(actions)))
    moved = frozen(program)
    executes = Machine(ownership).run(moved, drawn_by(data.draw(st.integers(0, 2**32))))
    violations = verify(moved, ownership)
    assert (violations == ()) == executes
    for violation in violations:
        assert str(moved[violation.worker][violation.position]) == violation.action
        assert violation.rule


@pytest.mark.parametrize(
    ("ownership", "wrong", "text"),
    [
        (
            one_slot_each(Grid(2, 2)),
            "0F2",
            "worker 0, position 0: 0F2: outside the grid of 1 x 2 slots and 2 microbatches",
        ),
        (
            one_slot_each(Grid(2, 2)),
            "2F0",
            "worker 0, position 0: 2F0: outside the grid of 1 x 2 slots and 2 microbatches",
        ),
        (
            one_slot_each(Grid(2, 2)),
            "0STEP@1",
            "worker 0, position 0: 0STEP@1: outside the grid of 1 x 2 slots and 2 microbatches",
        ),
        (
            one_slot_each(Grid(2, 2)),
            "0RECV_F0",
            "worker 0, position 0: 0RECV_F0: there is no other worker at the other end",
        ),
        (
            one_slot_each(Grid(2, 2)),
            "0SEND_B1",
            "worker 0, position 0: 0SEND_B1: there is no other worker at the other end",
        ),
        (
            Ownership(Grid(3, 2), (0, 0, 1)),
            "1RECV_F0",
            "worker 0, position 0: 1RECV_F0: there is no other worker at the other end",
        ),
        (
            Ownership(Grid(3, 2), (0, 0, 1)),
            "0SEND_F1",
            "worker 0, position 0: 0SEND_F1: there is no other worker at the other end",
        ),
    ],
)
def test_what_has_no_place_in_the_step_is_named(ownership: Ownership, wrong: str, text: str) -> None:
    program = dict(random_program(ownership, drawn_by(0)))
    program[0] = (*program_of(f"0: {wrong}")[0], *program[0])
    assert [str(violation) for violation in verify(program, ownership)] == [text]


def test_a_worker_that_owns_nothing_has_nothing_to_do() -> None:
    ownership = one_slot_each(Grid(1, 1))
    program = program_of("0: 0F0 0B0 0REDUCE_GRAD 0COMMIT 0STEP\n5:")
    assert verify(program, ownership) == ()
    stolen = program_of("0: 0F0 0B0 0REDUCE_GRAD 0COMMIT\n5: 0STEP")
    assert [str(each) for each in verify(stolen, ownership)] == [
        "worker 5, position 0: 0STEP: belongs to worker 0, the owner of its slot"
    ]


def test_all_violations_are_listed_not_only_the_first() -> None:
    program = program_of("0: 0F0 0B0 0REDUCE_GRAD\n1: 1RECV_F0 1B0 1F0 1SEND_B0 1REDUCE_GRAD 1COMMIT 1STEP")
    assert [str(each) for each in verify(program, one_slot_each(Grid(2, 1)))] == [
        "worker 0: 0SEND_F0: is missing",
        "worker 0: 0RECV_B0: is missing",
        "worker 0: 0COMMIT: is missing",
        "worker 0: 0STEP: is missing",
        "worker 1, position 1: 1B0: stands before 1F0, which it requires",
    ]
