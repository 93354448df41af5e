"""Verification accepts what executes and rejects every corruption, with worker, position, action and rule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.action import RECEIVE_OPS, WHOLE_STAGE, Action, Op, Program
from engine.core.ownership import Grid, Ownership, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.dependencies import carried, makes, needs
from engine.core.program.schedules import SCHEDULES
from engine.core.program.verify import Violation, verify
from tests.core.drawing import program_of
from tests.core.machine import Machine, Replica, drawn_by
from tests.core.random_programs import random_healing, random_ownership, random_program
from tests.looped import looped
from tests.soaked import soaked

TWO = fresh(Grid(2, 2))
SHADOWED = Ownership(Grid(2, 2), (0, 1), ((1,), (0,)))


@pytest.mark.parametrize("num_generated", [200, soaked(5000)])
def test_hundreds_of_generated_programs_are_accepted(num_generated: int) -> None:
    order = drawn_by(1)
    orders_seen = set()
    for _ in range(num_generated):
        ownership = random_ownership(order)
        healing = random_healing(ownership, order)
        program = random_program(ownership, order, healing)
        assert verify(program, ownership, healing) == ()
        orders_seen.add(tuple(program.items()))
    assert len(orders_seen) > num_generated / 2


@looped("schedule", SCHEDULES)
@looped("grid", [Grid(1, 1), Grid(4, 8), Grid(5, 2, pipelines=2), Grid(3, 3, ties=((0, 2),))])
def test_schedules_are_accepted(schedule: str, grid: Grid) -> None:
    ownership = fresh(grid)
    assert verify(build_program(schedule, ownership), ownership) == ()


Actions = dict[int, list[Action]]
Case = tuple[Actions, Ownership, list[Replica]]


@st.composite
def valid(draw: st.DrawFn) -> Case:
    """A valid program of at least two workers, of a schedule or in random order; some of its shadows are healing."""
    order = drawn_by(draw(st.integers(0, 2**32)))
    ownership = random_ownership(order)
    num_slots = len(ownership.owners)
    if draw(st.booleans()) or len(ownership.workers()) == 1:
        fresh = tuple(order.sample(range(num_slots + 1), num_slots))
        ownership = with_shadows(Ownership(ownership.grid, fresh), "lazy", 1, range(num_slots + 1))
    healing = random_healing(ownership, order)
    schedule = draw(st.sampled_from([*sorted(SCHEDULES), ""]))
    program = (
        build_program(schedule, ownership, draw(st.sampled_from(("lazy", "eager"))), healing)
        if schedule
        else random_program(ownership, order, healing)
    )
    return {worker: list(actions) for worker, actions in program.items()}, ownership, healing


def frozen(program: Actions) -> Program:
    """Returns the program as verification takes it."""
    return {worker: tuple(actions) for worker, actions in program.items()}


def place(data: st.DataObject, program: Actions) -> tuple[int, int]:
    """Draws a worker and a position."""
    worker = data.draw(st.sampled_from(sorted(each for each in program if program[each])))
    return worker, data.draw(st.integers(0, len(program[worker]) - 1))


def is_optional(action: Action, worker: int, ownership: Ownership) -> bool:
    """Says whether a step is whole without the action: a forward of a shadow."""
    return action.op is Op.F and ownership.owner(action.pipeline, action.stage) != worker


@given(st.data())
def test_a_dropped_action_is_missing(data: st.DataObject) -> None:
    program, ownership, healing = data.draw(valid())
    worker, position = place(data, program)
    dropped = program[worker].pop(position)
    violations = verify(frozen(program), ownership, healing)
    if not is_optional(dropped, worker, ownership):
        assert violations == (Violation(worker, -1, str(dropped), "is missing"),)
    elif dropped._replace(microbatch=dropped.microbatch + 1) not in program[worker]:
        assert violations == ()
    else:
        (violation,) = violations
        rule = f"requires {needs(dropped._replace(microbatch=dropped.microbatch + 1), worker, ownership)[-1][1]}"
        assert violation.rule == f"{rule}, which nobody makes"


@given(st.data())
def test_a_doubled_action_stands_twice(data: st.DataObject) -> None:
    program, ownership, healing = data.draw(valid())
    worker, position = place(data, program)
    action = program[worker][position]
    again = data.draw(st.integers(0, len(program[worker])))
    program[worker].insert(again, action)
    second = max(again, position + (again <= position))
    assert verify(frozen(program), ownership, healing) == (Violation(worker, second, str(action), "stands twice"),)


@given(st.data())
def test_an_action_on_another_worker_is_named(data: st.DataObject) -> None:
    program, ownership, healing = data.draw(valid())
    worker, position = place(data, program)
    thief = data.draw(st.sampled_from(sorted(set(program) - {worker})))
    to = data.draw(st.integers(0, len(program[thief])))
    action = program[worker].pop(position)
    program[thief].insert(to, action)
    violations = verify(frozen(program), ownership, healing)
    assert violations
    if thief not in ownership.replicas(action.pipeline, action.stage):
        owner = ownership.owner(action.pipeline, action.stage)
        assert violations == (Violation(thief, to, str(action), f"belongs to worker {owner}, the owner of its slot"),)


@given(st.data())
def test_two_workers_that_swap_everything_are_named(data: st.DataObject) -> None:
    program, ownership, healing = data.draw(valid())
    one, other = data.draw(st.permutations(sorted(program)))[:2]
    duties = [{each for each in program[w] if not is_optional(each, w, ownership)} for w in (one, other)]
    program[one], program[other] = program[other], program[one]
    violations = verify(frozen(program), ownership, healing)
    # Two shadows of the same slots may each do what the other did, in its order and with its optional forwards.
    assert bool(violations) == (duties[0] != duties[1])
    assert {violation.worker for violation in violations} <= {one, other}


@given(st.data())
def test_an_action_swapped_with_one_that_it_requires_is_named(data: st.DataObject) -> None:
    program, ownership, healing = data.draw(valid())
    pairs = []
    for worker, actions in program.items():
        makers: dict[object, list[int]] = {}
        for position, action in enumerate(actions):
            for made in makes(action, worker, ownership):
                makers.setdefault(made, []).append(position)
        for position, action in enumerate(actions):
            for need in needs(action, worker, ownership):
                if len(makers.get(need, ())) == 1:  # a shadow may have made what its own worker receives
                    pairs.append((worker, position, makers[need][0]))
    worker, later, earlier = data.draw(st.sampled_from(sorted(pairs)))
    actions = program[worker]
    first, second = actions[earlier], actions[later]
    actions[earlier], actions[later] = second, first
    rule = f"stands before {first}, which it requires"
    assert Violation(worker, earlier, str(second), rule) in verify(frozen(program), ownership, healing)


@given(st.data())
def test_a_replica_that_is_touched_too_late_is_named(data: st.DataObject) -> None:
    """A state leaves and comes, and a shadow's forward is made, before what is logged."""
    program, ownership, healing = data.draw(valid())
    late = [
        (worker, position, actions.index(end))
        for worker, actions in program.items()
        for position, action in enumerate(actions)
        for end in (_end_of_time_for(action, worker, ownership),)
        if end
    ]
    if not late:
        return
    worker, position, end = data.draw(st.sampled_from(sorted(late)))
    actions = program[worker]
    before, moved = actions[end], actions[position]
    actions.insert(end, actions.pop(position))
    violations = verify(frozen(program), ownership, healing)
    if moved.op is Op.HEAL:
        assert violations == (Violation(worker, end, str(moved), f"comes too late behind {before}"),)
    else:
        assert violations


def _end_of_time_for(action: Action, worker: int, ownership: Ownership) -> Action | None:
    """Returns the action at the same worker behind which this one may not come, if there is one."""
    if action.op is Op.HEAL or is_optional(action, worker, ownership):
        return action._replace(op=Op.LOG, microbatch=WHOLE_STAGE)
    return None


def sender_of(action: Action, program: Actions) -> int:
    """Returns the worker that sends what a receive takes."""
    (sender,) = (
        worker
        for worker, actions in program.items()
        for each in actions
        if each.op in (Op.SEND_F, Op.SEND_B) and carried(each) == carried(action)
    )
    return sender


def transfers_of_pair(program: Actions) -> list[tuple[int, int, int]]:
    """Returns (worker, position, position) of two receives of one worker from another."""
    return [
        (worker, first, second)
        for worker, actions in program.items()
        for second, later in enumerate(actions)
        for first, sooner in enumerate(actions[:second])
        if sooner.op in RECEIVE_OPS
        and later.op in RECEIVE_OPS
        and sender_of(sooner, program) == sender_of(later, program)
    ]


@st.composite
def two_transfers_of_a_pair(draw: st.DrawFn) -> tuple[Actions, Ownership]:
    """A program in which everything is made before it is used: only the order of transfers can be wrong."""
    num_stages, num_pipelines = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    grid = Grid(num_stages, draw(st.integers(2, 4)), num_pipelines)
    ownership = Ownership(grid, tuple(draw(st.permutations(range(num_stages * num_pipelines)))))
    program = {worker: list(actions) for worker, actions in build_program("gpipe", ownership).items()}
    ranks = {op: rank for rank, op in enumerate((Op.RECV_F, Op.F, Op.SEND_F, Op.RECV_B, Op.B, Op.SEND_B))}
    for actions in program.values():
        actions.sort(key=lambda action: ranks.get(action.op, len(ranks)))
    return program, ownership


@given(st.data())
def test_crossed_transfers_are_named(data: st.DataObject) -> None:
    program, ownership = data.draw(two_transfers_of_a_pair())
    assert verify(frozen(program), ownership) == ()
    worker, first, second = data.draw(st.sampled_from(transfers_of_pair(program)))
    actions = program[worker]
    sender = sender_of(actions[first], program)
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
        0: 0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
        1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1LOG 1COMMIT 1STEP
        """
    )
    (violation,) = verify(program, TWO)
    assert str(violation) == "worker 1, position 4: 1RECV_F1: crosses an earlier send of worker 0"


def test_a_deadlock_is_named_by_its_cycle() -> None:
    program = program_of(
        """
        0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
        1: 1RECV_F0 1F0 1RECV_B0 1B0 1SEND_B0 1SEND_F0 1REDUCE_GRAD 1LOG 1COMMIT 1STEP
        2: 2RECV_F0 2F0 2B0 2SEND_B0 2REDUCE_GRAD 2LOG 2COMMIT 2STEP
        """
    )
    (violation,) = verify(program, fresh(Grid(3, 1)))
    assert violation == Violation(
        1,
        2,
        "1RECV_B0",
        "deadlock: worker 1: 1RECV_B0 -> worker 2: 2RECV_F0 -> worker 1: 1RECV_B0",
    )


@settings(max_examples=300)
@given(valid(), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)), max_size=4), st.data())
def test_exactly_what_executes_is_accepted(case: Case, moves: list[tuple[int, int, int]], data: st.DataObject) -> None:
    program, ownership, healing = case
    for which, source, target in moves:
        actions = program[sorted(program)[which % len(program)]]
        if actions:
            actions.insert(target % len(actions), actions.pop(source % len(actions)))
    moved = frozen(program)
    executes = Machine(ownership, healing=healing).run(moved, drawn_by(data.draw(st.integers(0, 2**32))))
    violations = verify(moved, ownership, healing)
    assert (violations == ()) == executes
    for violation in violations:
        assert str(moved[violation.worker][violation.position]) == violation.action
        assert violation.rule


@looped(
    ("ownership", "wrong", "text"),
    [
        (TWO, "0F2", "worker 0, position 0: 0F2: outside the grid of 1 x 2 slots and 2 microbatches"),
        (TWO, "2F0", "worker 0, position 0: 2F0: outside the grid of 1 x 2 slots and 2 microbatches"),
        (TWO, "0STEP@1", "worker 0, position 0: 0STEP@1: outside the grid of 1 x 2 slots and 2 microbatches"),
        (TWO, "0RECV_F0", "worker 0, position 0: 0RECV_F0: there is no other worker at the other end"),
        (TWO, "0SEND_B1", "worker 0, position 0: 0SEND_B1: there is no other worker at the other end"),
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
        (TWO, "0f0", "worker 0, position 0: 0f0: no part of a whole step"),
        (TWO, "0I0", "worker 0, position 0: 0I0: stands beside a backward of this microbatch in another form"),
        (TWO, "0W1", "worker 0, position 0: 0W1: stands beside a backward of this microbatch in another form"),
        (TWO, "0HEAL", "worker 0, position 0: 0HEAL: heals nobody"),
        (SHADOWED, "1HEAL", "worker 0, position 0: 1HEAL: heals nobody"),
        (SHADOWED, "1B0", "worker 0, position 0: 1B0: belongs to worker 1, the owner of its slot"),
        (SHADOWED, "1REDUCE_GRAD", "worker 0, position 0: 1REDUCE_GRAD: belongs to worker 1, the owner of its slot"),
        (TWO, "1LOG", "worker 0, position 0: 1LOG: belongs to worker 1, the owner of its slot"),
        (
            Ownership(Grid(1, 2, pipelines=2), (0, 0)),
            "0REDUCE_GRAD@1",
            "worker 0, position 0: 0REDUCE_GRAD@1: the worker reduces this stage with the first of its pipelines",
        ),
    ],
)
def test_what_has_no_place_in_the_step_is_named(ownership: Ownership, wrong: str, text: str) -> None:
    program = dict(random_program(ownership, drawn_by(0)))
    program[0] = (*program_of(f"0: {wrong}")[0], *program[0])
    assert [str(violation) for violation in verify(program, ownership)] == [text]


def test_a_shadow_runs_no_forward_of_a_slot_that_it_has_not_yet() -> None:
    healing = [(0, (0, 1))]
    program = build_program("1f1b", SHADOWED, healing=healing)
    assert verify(program, SHADOWED, healing) == ()
    at = program[0].index(program_of("0: 0F0")[0][0]) + 1
    program = {**program, 0: (*program[0][:at], *program_of("0: 1F0")[0], *program[0][at:])}
    (violation,) = verify(program, SHADOWED, healing)
    assert str(violation) == f"worker 0, position {at}: 1F0: has no whole replica of its slot yet"


def test_a_state_comes_before_what_is_streamed_on_top_of_it() -> None:
    healing = [(0, (0, 1))]
    program = build_program("1f1b", SHADOWED, "lazy", healing)
    (heal,) = program_of("0: 1HEAL")[0]
    (stream,) = program_of("0: 1STREAM0")[0]
    at = program[0].index(heal)
    late = {**program, 0: (*program[0][:at], stream, *program[0][at:])}
    text = f"worker 0, position {at}: 1STREAM0: has no whole replica of its slot yet"
    assert text in map(str, verify(late, SHADOWED, healing))


def test_a_state_that_a_new_shadow_does_not_get_is_missing() -> None:
    program = build_program("1f1b", SHADOWED)
    assert [str(each) for each in verify(program, SHADOWED, [(0, (0, 1))])] == [
        "worker 0: 1HEAL: is missing",
        "worker 1: 1HEAL: is missing",
    ]


def test_forwards_of_a_slot_come_in_the_order_of_microbatches() -> None:
    program = program_of("0: 0F1 0F0 0B0 0B1 0REDUCE_GRAD 0LOG 0COMMIT 0STEP")
    assert [str(each) for each in verify(program, fresh(Grid(1, 2)))] == [
        "worker 0, position 0: 0F1: stands before 0F0, which it requires"
    ]


def test_a_worker_that_owns_nothing_has_nothing_to_do() -> None:
    ownership = fresh(Grid(1, 1))
    program = program_of("0: 0F0 0B0 0REDUCE_GRAD 0LOG 0COMMIT 0STEP\n5:")
    assert verify(program, ownership) == ()
    stolen = program_of("0: 0F0 0B0 0REDUCE_GRAD 0LOG 0COMMIT\n5: 0STEP")
    assert [str(each) for each in verify(stolen, ownership)] == [
        "worker 5, position 0: 0STEP: belongs to worker 0, the owner of its slot"
    ]


def test_all_violations_are_listed_not_only_the_first() -> None:
    program = program_of("0: 0F0 0B0 0REDUCE_GRAD\n1: 1RECV_F0 1B0 1F0 1SEND_B0 1REDUCE_GRAD 1LOG 1COMMIT 1STEP")
    assert [str(each) for each in verify(program, fresh(Grid(2, 1)))] == [
        "worker 0: 0SEND_F0: is missing",
        "worker 0: 0RECV_B0: is missing",
        "worker 0: 0LOG: is missing",
        "worker 0: 0COMMIT: is missing",
        "worker 0: 0STEP: is missing",
        "worker 1, position 1: 1B0: stands before 1F0, which it requires",
    ]
