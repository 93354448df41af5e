"""The order of messages on a wire without tags: every program runs in it, and a mistake in it is found by a key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.core.action import OP_TABLE, RECEIVE_OPS, SEND_OPS, Op, Program, Where
from engine.core.errors import ScheduleError
from engine.core.ownership import Grid, Ownership, Redundancy, fresh, with_shadows
from engine.core.program.build import build_program, build_validation
from engine.core.program.dependencies import carried, makes, needs
from engine.core.program.issue_order import WITHOUT_TAGS, Issue, RoutedValue, issue_order, issued_by
from engine.core.program.planner import PlanInput, make_plan
from engine.core.program.schedules import SCHEDULES
from engine.core.value import WIRE, Kind
from tests.core.drawing import program_of
from tests.core.recovery_cases import (
    ANY_ORDER,
    Failure,
    Job,
    assert_faultless,
    distinct_kills,
    random_history,
    random_job,
    seeded,
)
from tests.doubles.ordered_machine import OrderedMachine
from tests.doubles.ordered_wire import MismatchError, Operation, OrderedWire
from tests.soaked import soaked

_EVERY = 83  # kills, times pipelines and stages of a worker, one is tried
_SHAPES = [(name, v) for name, schedule in SCHEDULES.items() for v in (1, 2) if schedule.takes(v)]
_LATE = frozenset({Kind.STREAMED, Kind.STATE})  # values that a worker may miss, or gets late
Issues = Mapping[int, tuple[Issue, ...]]


class EagerMachine(OrderedMachine):
    """A machine that receives early, and on whose wire every second send, as drawn, ends before its receive begins."""

    def enter(self, programs: object, ownership: Ownership) -> None:
        """Begins programs with other draws each time."""
        order = seeded(len(self.done))
        self.buffers = lambda: order.random() < 0.5
        self.receives_early = True
        super().enter(programs, ownership)  # type: ignore[arg-type]


def of_shape(schedule: str, stages_per_worker: int, pipelines: int, redundancy: Redundancy, **other: object) -> Job:
    """Returns a job of 4 workers and 4 microbatches, or as few more as the schedule takes."""
    microbatches = max(4, SCHEDULES[schedule].least_microbatches(4))
    grid = Grid(4 * stages_per_worker, microbatches, pipelines)
    job = Job(grid, schedule, redundancy, stages_per_worker=stages_per_worker, machine_type=OrderedMachine)
    return replace(job, **other)  # type: ignore[arg-type]


def finish(failure: Failure, job: Job, heals: bool) -> None:
    """Runs the plan and, with `heals`, the next step, which heals new shadows; the bits are those without a fault."""
    machine = failure.finish(seeded(ANY_ORDER))
    assert_faultless(machine)
    if heals:
        ownership = job.healed(machine.ownership, sorted(machine.bodies))
        slots = [(worker, slot) for slot in ownership.grid.slots() for worker in ownership.shadows_of(*slot)]
        healing = [(worker, slot) for worker, slot in slots if slot not in machine.bodies[worker].replicas]
        machine.enter([job.program(ownership, healing)], ownership)
        assert machine.run(seeded(ANY_ORDER))
        assert_faultless(machine)


def test_only_transfers_of_a_step_are_issued() -> None:
    sent = {term.kind for op in SEND_OPS for term in OP_TABLE[op].makes if term.at is Where.WIRE}
    assert sent == WITHOUT_TAGS
    others = {term.kind for op in {*Op} - SEND_OPS for term in OP_TABLE[op].makes if term.at is Where.WIRE}
    assert others >= _LATE and not others & WITHOUT_TAGS


def test_a_receive_is_issued_where_its_taker_has_come_to() -> None:
    program = build_program("1f1b", fresh(Grid(2, 3)))
    found = issue_order(program, fresh(Grid(2, 3)))
    lines = {
        worker: [f"{program[worker][behind]} {message.value.kind[0]}{message.value.index}" for behind, message in line]
        for worker, line in found.items()
    }  # the action before which a message is issued, and the message
    assert lines == {
        0: ["0F1 a0", "0RECV_B0 a1", "0RECV_B0 g0", "0SEND_F2 g1", "0RECV_B1 a2", "0RECV_B2 g2"],
        1: ["1RECV_F0 a0", "1B0 a1", "1RECV_F1 g0", "1RECV_F2 g1", "1RECV_F2 a2", "1REDUCE_GRAD g2"],
    }


def test_a_program_that_is_stuck_is_refused() -> None:
    stuck = program_of("0: 0F0 0RECV_B0 0B0 0SEND_F0\n1: 1RECV_F0 1F0 1B0 1SEND_B0")
    with pytest.raises(ScheduleError, match="does not come past"):
        issue_order(stuck, fresh(Grid(2, 1)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_pair_issues_in_one_order_at_both_ends(name: str) -> None:
    v = SCHEDULES[name].stages_per_worker[0]
    ownership = fresh(Grid(4 * v, SCHEDULES[name].least_microbatches(4) + 2), v, SCHEDULES[name].placement)
    program = build_program(name, ownership)
    lines = {worker: issued_by(worker, program, ownership) for worker in program}
    for one in program:
        for other in program:
            sent, taken = ([each for each in lines[end] if each[1:] == (one, other)] for end in (one, other))
            assert sent == taken
    num_sent = sum(action.op in SEND_OPS for actions in program.values() for action in actions)
    assert sum(map(len, lines.values())) == 2 * num_sent > 0


@pytest.mark.parametrize(
    ("workers", "pipelines"), [(2, 2), (3, 2), (8, 1), *(soaked(*each) for each in ((2, 1), (3, 1), (8, 2)))]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_runs_without_tags(name: str, workers: int, pipelines: int) -> None:
    schedule = SCHEDULES[name]
    v = schedule.stages_per_worker[0]
    grid = Grid(workers * v, schedule.least_microbatches(workers) + 1, pipelines, ((0, workers * v - 1),))
    for machine_type in (OrderedMachine, EagerMachine):
        machine = Job(grid, name, "eager", stages_per_worker=v, log_every=2, machine_type=machine_type).machine()
        assert machine.run(seeded(ANY_ORDER))
        assert_faultless(machine)


@pytest.mark.timeout(300)  # 2 s each on an idle machine
@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize(("schedule", "stages_per_worker"), _SHAPES)
def test_plans_and_heals_run_without_tags(schedule: str, stages_per_worker: int, pipelines: int) -> None:
    """Kills at every nth place, at another one for each schedule; `test_schedule_kills` has every place."""
    redundancies: tuple[Redundancy, ...] = ("lazy", "eager") if pipelines == 1 else ("none", "lazy", "eager", "reroute")
    number, first = 0, _SHAPES.index((schedule, stages_per_worker)) * 17
    for redundancy in redundancies:
        job = of_shape(schedule, stages_per_worker, pipelines, redundancy, log_every=int(redundancy == "eager"))
        for failure in distinct_kills(job, _EVERY * pipelines * stages_per_worker, first):
            number += 1
            finish(failure, job, heals=number % 3 == 0)
    assert number


@pytest.mark.parametrize(("blocks", "redundancy"), [(2, "lazy"), (2, "eager"), (4, "eager")])
def test_two_neighbours_finish_the_step_of_a_worker_with_a_run_of_blocks(blocks: int, redundancy: Redundancy) -> None:
    """Kills at every nth place of three workers; every third step is healed."""
    job = Job(Grid(3 * blocks, 4, blocks=blocks), redundancy=redundancy, log_every=2, machine_type=OrderedMachine)
    shares = {}
    for number, failure in enumerate(distinct_kills(job, 4 * blocks, first=blocks)):
        (victim,) = {*range(3)} - {*failure.machine.bodies}
        shares[victim] = failure.given.ownership.owners
        finish(failure, job, heals=number % 3 == 0)
    half, end = blocks // 2, blocks + blocks // 2
    assert shares == {
        0: (2,) * half + (1,) * end + (2,) * blocks,
        1: (0,) * end + (2,) * end,
        2: (0,) * blocks + (1,) * end + (0,) * half,
    }


@pytest.mark.parametrize("machine_type", [OrderedMachine, EagerMachine])
def test_random_histories_run_without_tags(machine_type: type[OrderedMachine]) -> None:
    num_failures = 0
    for number in range(60):
        order = seeded(number)
        history = random_history(replace(random_job(order), machine_type=machine_type), order)
        if history is not None:
            assert_faultless(history[0])
            num_failures += len(history[1])
    assert num_failures > 30


@pytest.mark.parametrize("leaver", range(4))
def test_a_hand_over_runs_without_tags(leaver: int) -> None:
    """The plan that is made ahead of a boundary: a leaver's shadow owns its slot, and the leaver shadows it."""
    for pipelines, (schedule, v) in [(1, ("1f1b", 1)), (2, ("interleaved", 2))]:
        job = of_shape(schedule, v, pipelines, "lazy")
        machine = job.machine()
        assert machine.run(seeded(ANY_ORDER))
        before = machine.ownership
        owners = tuple(
            before.shadows_of(*slot)[0] if owner == leaver else owner
            for slot, owner in zip(before.grid.slots(), before.owners, strict=True)
        )
        shadows = tuple(
            tuple(dict.fromkeys(leaver if each == owner else each for each in line))
            for line, owner in zip(before.shadows, owners, strict=True)
        )
        after = Ownership(before.grid, owners, shadows)
        given = PlanInput(1, 0, after, machine.inventories())
        machine.adopt((), after)
        finish(Failure(machine, given, make_plan(given)), job, heals=False)


def test_a_validation_pass_runs_without_tags() -> None:
    for stages, v in ((4, 1), (6, 2)):
        ownership = fresh(Grid(stages, 5), v)
        program = build_validation(ownership)
        sent = [action for actions in program.values() for action in actions if action.op in SEND_OPS]
        assert all_delivered(issue_order(program, ownership)) == len(sent) > 0


def all_delivered(issues: Issues, buffers: Callable[[], bool] = lambda: False, checks_keys: bool = True) -> int:
    """Returns how many messages arrive if every worker issues all of its own; 0 if workers wait for each other."""
    wire = OrderedWire(buffers, checks_keys)
    for worker, line in issues.items():
        for _, message in line:
            wire.issue(worker, [operation(worker, message)])
    return 0 if wire.waiting() else wire.num_delivered


def operation(worker: int, message: RoutedValue) -> Operation:
    """Returns the end of a message at one of its workers."""
    sends = message.source == worker
    return Operation(sends, message.target if sends else message.source, message, size=1)


# Planted mistakes.


def in_program_order(program: Program, ownership: Ownership) -> Issues:
    """Issues each transfer at its own action, as a backend with tags may do."""
    right = issue_order(program, ownership)
    ends = {message.value: message for line in right.values() for _, message in line}
    return {
        worker: tuple(
            Issue(at + (action.op in SEND_OPS), ends[carried(action)])
            for at, action in enumerate(actions)
            if action.op in SEND_OPS | RECEIVE_OPS
        )
        for worker, actions in program.items()
    }


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gpipe"])
def test_planted_sends_of_neighbours_that_cross_wait_for_each_other(name: str) -> None:
    schedule = SCHEDULES[name]
    v = max(2, schedule.stages_per_worker[0]) if schedule.takes(2) else 1
    ownership = fresh(Grid(4 * v, 8), v, schedule.placement)
    machine = OrderedMachine(ownership, retain=True)
    machine.order_of = in_program_order
    machine.enter([build_program(name, ownership)], ownership)
    with pytest.raises(AssertionError, match="nobody can go on"):
        machine.run(seeded(ANY_ORDER))


def with_a_swap(issues: Issues, nth: int) -> Issues | None:
    """Returns the issues with two successive sends to one worker exchanged, the nth pair of equal size, or None."""
    for worker, line in issues.items():
        sends = [at for at, (_, message) in enumerate(line) if message.source == worker]
        for one, other in pairwise(sends):
            first, second = line[one].message, line[other].message
            if first.target == second.target:
                if nth == 0:
                    swapped, behind = list(line), line[other].behind  # both are made by then
                    swapped[one], swapped[other] = Issue(behind, second), Issue(behind, first)
                    return {**issues, worker: tuple(swapped)}
                nth -= 1
    return None


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_planted_swap_of_two_sends_of_equal_size_is_found_by_the_key(schedule: str, v: int) -> None:
    job = of_shape(schedule, v, 1, "lazy")
    right = issue_order(job.program(job.ownership()), job.ownership())
    found = 0
    while (swapped := with_a_swap(right, found)) is not None:
        with pytest.raises(MismatchError):
            all_delivered(swapped)
        assert all_delivered(swapped, checks_keys=False) == all_delivered(right)
        found += 1
    assert found > 10


def run_and_compare(machine: OrderedMachine) -> None:
    """Runs a step to its end and compares its bits with those of a run without a fault."""
    assert machine.run(seeded(ANY_ORDER))
    assert_faultless(machine)


@pytest.mark.parametrize("checks_keys", [True, False])
def test_without_keys_a_swap_would_change_the_bits(checks_keys: bool) -> None:
    job = of_shape("gpipe", 1, 1, "lazy")
    ownership = job.ownership()
    machine = OrderedMachine(ownership, retain=True)
    machine.checks_keys = checks_keys
    swapped = with_a_swap(issue_order(job.program(ownership), ownership), 0)
    assert swapped is not None
    machine.order_of = lambda *given: swapped
    machine.enter([job.program(ownership)], ownership)
    with pytest.raises(MismatchError if checks_keys else AssertionError):
        run_and_compare(machine)


def with_late_values(program: Program, ownership: Ownership) -> Issues:
    """Issues the streams, states and logs too, each at its own actions, on the wire of the transfers."""
    found = {worker: list(line) for worker, line in issue_order(program, ownership).items()}
    sources = {
        value: worker
        for worker, actions in program.items()
        for action in actions
        for place, value in makes(action, worker, ownership)
        if place == WIRE and value.kind in _LATE
    }
    for worker, actions in program.items():
        for at, action in enumerate(actions):
            for place, value in needs(action, worker, ownership):
                if place == WIRE and value.kind in _LATE:
                    message = RoutedValue(value, sources[value], worker)
                    source = program[message.source].index(action)
                    found[worker].append(Issue(at, message))
                    found[message.source].append(Issue(source + 1, message))
    return {worker: tuple(sorted(line, key=lambda issue: issue.behind)) for worker, line in found.items()}


@pytest.mark.parametrize(
    ("schedule", "log_every", "healing"),
    [("gpipe", 1, []), ("1f1b", 0, [(0, (0, 1)), (1, (0, 2)), (2, (0, 3)), (3, (0, 0))])],
)
@pytest.mark.parametrize("buffers", [lambda: False, lambda: True])
def test_planted_late_values_on_the_wire_are_found(
    schedule: str, log_every: int, healing: list[tuple[int, tuple[int, int]]], buffers: Callable[[], bool]
) -> None:
    ownership = with_shadows(fresh(Grid(4, 4)), "lazy", 1, range(4))
    program = build_program(schedule, ownership, "lazy", healing, log_every)
    assert all_delivered(issue_order(program, ownership), buffers)
    with pytest.raises((MismatchError, AssertionError)):
        assert all_delivered(with_late_values(program, ownership), buffers), "workers wait for each other"


def test_the_wire_matches_in_order_and_groups_begin_together() -> None:
    wire = OrderedWire()
    wire.issue(0, [Operation(True, 1, "a", 1)])
    wire.issue(0, [Operation(False, 1, "b")])
    assert wire.waiting() == [(0, Operation(True, 1, "a", 1))], "a send waits for its receive"
    wire.issue(1, [Operation(True, 0, "b", 2), Operation(False, 0, "a")])
    assert wire.arrived == {(1, "a"): 1, (0, "b"): 2}
    wire.issue(1, [Operation(True, 0, "c", 3)])
    with pytest.raises(MismatchError, match="worker 0 asked worker 1 for d: c came"):
        wire.issue(0, [Operation(False, 1, "d")])
