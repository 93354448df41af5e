"""Redundant forwards: who runs them, where they are put, and that a step gets no longer than it must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.action import COMPUTE_OPS, FORWARD_OPS, Action, Op, Program
from engine.core.ownership import Grid, Ownership, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.dry_run import Cost, dry_run, unit_costs
from engine.core.program.owners import on_owners
from engine.core.program.passes import (
    lazy_slots,
    overhead_floor,
    redundant_slots,
    with_redundant_forwards,
    with_transfers,
)
from engine.core.program.remaining_tasks import merged_compute
from engine.core.program.schedules import SCHEDULES
from engine.core.program.verify import verify
from tests.core.drawing import drawn_program, plain, program_of
from tests.looped import looped

F, B = unit_costs(Action(0, Op.F, 0)), unit_costs(Action(0, Op.B, 0))


def shadowed(grid: Grid, owners: tuple[int, ...] = ()) -> Ownership:
    """The ownership of a fresh job, or one with these owners, with one shadow for each slot."""
    ownership = Ownership(grid, owners) if owners else fresh(grid)
    return with_shadows(ownership, "eager", 1, ownership.workers())


def compute_of(schedule: str, ownership: Ownership) -> Program:
    return on_owners(SCHEDULES[schedule](ownership.grid.stages, ownership.grid.microbatches), ownership)


def appended(program: Program, ownership: Ownership) -> Program:
    """The simplest way: every redundant forward behind its worker's own actions."""
    lists = dict(program)
    for (pipeline, stage), worker in redundant_slots(ownership).items():
        lists[worker] += tuple(Action(stage, Op.F, each, pipeline) for each in range(ownership.grid.microbatches))
    return lists


def length(compute: Program, ownership: Ownership, cost: Cost = unit_costs) -> float:
    return dry_run(with_transfers(compute, ownership), ownership, cost).makespan


def floor(num_stages: int, num_microbatches: int) -> float:
    """What no placement can beat: the pipeline itself, and the work of a worker that cannot begin at once."""
    pipeline = (num_microbatches + num_stages - 1) * (F + B)
    return max(pipeline, num_microbatches * (2 * F + B) + (num_stages - 2) * F)


def test_gaps_are_filled_and_the_rest_stands_behind_the_last_backward() -> None:
    ownership = shadowed(Grid(3, 3))
    assert drawn_program(with_redundant_forwards(compute_of("1f1b", ownership), ownership)) == plain(
        """
        0: 0F0 0F1 0F2 1F0 1F1 1F2 0B0 0B1 0B2
        1: 1F0 1F1 2F0 2F1 1B0 1F2 1B1 2F2 1B2
        2: 0F0 0F1 2F0 2B0 2F1 2B1 2F2 2B2 0F2
        """
    )


def test_a_whole_step_has_them_before_its_end_and_sends_nothing_more() -> None:
    ownership = shadowed(Grid(4, 4))
    plainly, eagerly = (build_program("1f1b", ownership, redundancy) for redundancy in ("lazy", "eager"))
    for worker, actions in eagerly.items():
        extra = [action for action in actions if action.op is Op.F and action.stage != worker]
        assert extra == [Action((worker + 1) % 4, Op.F, each) for each in range(4)]
        assert tuple(action for action in actions if action not in extra) == plainly[worker]
        assert actions.index(extra[-1]) < actions.index(Action(worker, Op.REDUCE_GRAD))


@looped(
    ("num_stages", "num_microbatches", "overhead"),
    [
        (4, 4, 0.0),
        (4, 7, 0.0),
        (4, 8, 0.0303),
        (4, 16, 0.1579),
        (2, 8, 0.1852),
        (8, 16, 0.0145),
        (8, 32, 0.1453),
        (12, 24, 0.0095),
        (12, 32, 0.0698),
    ],
)
def test_the_floor_is_attained(num_stages: int, num_microbatches: int, overhead: float) -> None:
    ownership = shadowed(Grid(num_stages, num_microbatches))
    compute = compute_of("1f1b", ownership)
    found = length(with_redundant_forwards(compute, ownership), ownership)
    assert found == floor(num_stages, num_microbatches)
    assert found / length(compute, ownership) - 1 == pytest.approx(overhead, abs=5e-5)
    assert overhead_floor(num_stages, num_microbatches, F, B) == pytest.approx(overhead, abs=5e-5)


@looped("num_stages", range(2, 9))
def test_small_steps_attain_the_floor_and_appending_is_never_better(num_stages: int) -> None:
    for num_microbatches in range(1, 13):
        ownership = shadowed(Grid(num_stages, num_microbatches))
        compute = compute_of("1f1b", ownership)
        found = length(with_redundant_forwards(compute, ownership), ownership)
        assert found == floor(num_stages, num_microbatches)
        assert found <= length(appended(compute, ownership), ownership)


def found_by_a_kill(program: Program, ownership: Ownership, stage: int) -> list[tuple[int, int]]:
    """How many forwards of a stage its owner and its shadow have run after each quarter of its backwards."""
    shadow, spans = redundant_slots(ownership)[0, stage], dry_run(program, ownership).spans
    ends = {(span.worker, *span.action[:3]): span.end for span in spans}
    microbatches = range(ownership.grid.microbatches)
    found = []
    for quarter in range(1, 5):
        at = ends[stage, stage, Op.B, quarter * len(microbatches) // 4 - 1]
        owned, rerun = (sum(ends[each, stage, Op.F, m] <= at for m in microbatches) for each in (stage, shadow))
        found.append((owned, rerun))
    return found


@looped(
    ("grid", "stage", "found"),
    [
        (Grid(4, 8), 0, [(5, 4), (7, 4), (8, 4), (8, 8)]),
        (Grid(4, 8), 1, [(4, 5), (6, 5), (8, 6), (8, 8)]),
        (Grid(4, 8), 2, [(3, 4), (5, 4), (7, 4), (8, 6)]),
        (Grid(4, 8), 3, [(2, 3), (4, 3), (6, 3), (8, 4)]),
        (Grid(2, 8), 1, [(2, 3), (4, 5), (6, 7), (8, 8)]),
        (Grid(12, 32), 6, [(13, 14), (21, 16), (29, 16), (32, 22)]),
    ],
)
def test_what_no_gap_takes_stands_as_early_as_it_costs_nothing(
    grid: Grid, stage: int, found: list[tuple[int, int]]
) -> None:
    ownership = shadowed(grid)
    program = build_program("1f1b", ownership, "eager")
    assert found_by_a_kill(program, ownership, stage) == found
    assert dry_run(program, ownership).makespan == floor(grid.stages, grid.microbatches)


def test_costs_decide_the_places() -> None:
    ownership = shadowed(Grid(2, 3))
    slow_backward = with_redundant_forwards(
        compute_of("1f1b", ownership), ownership, lambda action: {Op.F: 1.0, Op.B: 9.0}[action.op]
    )
    slow_forward = with_redundant_forwards(
        compute_of("1f1b", ownership), ownership, lambda action: {Op.F: 9.0, Op.B: 1.0}[action.op]
    )
    assert [str(each) for each in slow_backward[0]] == "0F0 0F1 1F0 1F1 0B0 0F2 0B1 1F2 0B2".split()
    assert [str(each) for each in slow_forward[0]] == "0F0 0F1 1F0 0B0 0F2 0B1 1F1 1F2 0B2".split()


def test_only_the_first_shadow_with_the_input_at_hand_takes_part() -> None:
    grid = Grid(4, 2)
    ownership = Ownership(grid, (0, 1, 2, 3), ((2, 3), (0,), (3,), ()))
    assert redundant_slots(ownership) == {(0, 0): 2, (0, 1): 0}  # stage 2 is shadowed by the owner of stage 3
    assert redundant_slots(ownership, healing={(2, (0, 0))}) == {(0, 1): 0}
    program = with_redundant_forwards(compute_of("1f1b", ownership), ownership, healing={(2, (0, 0)), (0, (0, 1))})
    assert program == compute_of("1f1b", ownership)


def test_the_first_half_of_a_run_is_run_again_and_the_second_half_stays_lazy() -> None:
    ownership = shadowed(Grid(12, 4, blocks=4), (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2))
    again = {(0, 0): 2, (0, 1): 2, (0, 4): 0, (0, 5): 0, (0, 8): 1, (0, 9): 1}
    assert redundant_slots(ownership) == again, "the input of the second slot is the output of the first, run again"
    assert lazy_slots(ownership) == tuple(slot for slot in ownership.grid.slots() if slot not in again)
    assert lazy_slots(ownership, healing={(0, (0, 4))})[2:4] == ((0, 4), (0, 5))
    program = build_program("1f1b", ownership, "eager", log_every=1)
    assert verify(program, ownership) == ()


def test_the_preceding_stage_of_another_pipeline_does_not_have_the_input() -> None:
    ownership = Ownership(Grid(2, 2, pipelines=2), (0, 1, 2, 3), ((3,), (2,), (1,), (2,)))
    assert redundant_slots(ownership) == {(0, 0): 3, (1, 0): 1, (1, 1): 2}


def test_a_shadow_that_owns_nothing_runs_the_first_stage_alone() -> None:
    ownership = Ownership(Grid(1, 2), (0,), ((5,),))
    assert with_redundant_forwards(compute_of("1f1b", ownership), ownership) == program_of(
        "0: 0F0 0B0 0F1 0B1\n5: 0F0 0F1"
    )


@pytest.mark.parametrize("owners", [(0, 0, 1, 2), (0, 1, 1, 2), (2, 0, 1, 2), (0, 0, 0, 1)])
def test_a_worker_with_two_stages(owners: tuple[int, ...]) -> None:
    ownership = shadowed(Grid(4, 6), owners)
    compute = merged_compute(ownership)
    program = with_redundant_forwards(compute, ownership)
    assert redundant_slots(ownership)
    assert num_of(program, ownership) == len(redundant_slots(ownership)) * 6
    assert length(program, ownership) <= length(appended(compute, ownership), ownership)


def num_of(program: Program, ownership: Ownership) -> int:
    """Returns how many of a program's forwards are redundant."""
    return sum(
        ownership.owner(action.pipeline, action.stage) != worker
        for worker, actions in program.items()
        for action in actions
        if action.op in FORWARD_OPS
    )


@st.composite
def ownerships(draw: st.DrawFn) -> Ownership:
    """Any owners of any grid, some with several slots, and shadows as they are placed or at random."""
    grid = Grid(draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 2)))
    num_slots = len(grid.slots())
    owners = draw(st.lists(st.integers(0, num_slots - 1), min_size=num_slots, max_size=num_slots))
    ownership = Ownership(grid, tuple(owners))
    members = range(num_slots + 1)
    if draw(st.booleans()):
        return with_shadows(ownership, "eager", draw(st.integers(1, 2)), members)
    shadows = tuple(
        tuple(draw(st.lists(st.sampled_from([each for each in members if each != owner]), max_size=2, unique=True)))
        for owner in owners
    )
    return Ownership(grid, tuple(owners), shadows)


COSTS = st.fixed_dictionaries({Op.F: st.integers(1, 5), Op.B: st.integers(1, 9)})


@given(ownerships(), COSTS)
def test_every_program_finishes_and_keeps_the_own_actions(ownership: Ownership, costs: dict[Op, int]) -> None:
    def cost(action: Action) -> float:
        return costs.get(action.op, 0) * (1 + action.stage % 2)

    compute = merged_compute(ownership)
    program = with_redundant_forwards(compute, ownership, cost)
    found = redundant_slots(ownership)
    for worker, actions in program.items():
        own = tuple(action for action in actions if ownership.owner(action.pipeline, action.stage) == worker)
        assert own == compute.get(worker, ())
        for slot, shadow in found.items():
            extra = [action.microbatch for action in actions if (action.pipeline, action.stage) == slot]
            if shadow == worker:
                assert extra == list(range(ownership.grid.microbatches))
    assert num_of(program, ownership) == len(found) * ownership.grid.microbatches
    run = dry_run(build_program("1f1b", ownership, "eager"), ownership, cost)
    assert sum(span.action.op in COMPUTE_OPS for span in run.spans) == sum(map(len, program.values()))


@pytest.mark.timeout(10)  # it takes 0.2 s; searching all lists for each action would take minutes
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb1p"])
def test_a_large_step_is_quick(schedule: str) -> None:
    ownership = shadowed(Grid(64, 128))
    assert num_of(with_redundant_forwards(compute_of(schedule, ownership), ownership), ownership) == 64 * 128
