"""List scheduling: it is 1F1B where every worker has one slot, and as good as can be where one has two."""

from __future__ import annotations

from typing import Any

import pytest

from engine.bench import figures as redo
from engine.bench.figures import Redo
from engine.core.action import Action, Op
from engine.core.errors import InvariantError
from engine.core.history.run_records import ActionRecord
from engine.core.ownership import Grid, Ownership, fresh
from engine.core.program import remaining_tasks
from engine.core.program.dry_run import dry_run
from engine.core.program.passes import with_transfers
from engine.core.program.remaining_tasks import in_flight, merged_compute, starts
from engine.core.program.schedules import SCHEDULES, in_blocks
from tests.core.drawing import drawn_program, plain
from tests.core.made_records import made_history
from tests.looped import looped

_FORWARD_AND_BACKWARD = 3  # units


def _merged(grid: Grid, first: int) -> Ownership:
    """Returns the ownership after worker `first` has taken over the stage behind its own, wrapping round."""
    owners = list(range(grid.stages))
    owners[(first + 1) % grid.stages] = first
    return Ownership(grid, tuple(owners))


def test_two_stages_on_one_worker() -> None:
    assert drawn_program(merged_compute(_merged(Grid(3, 2), 1))) == plain(
        """
        0: 0F0 0F1 0B0 0B1
        1: 1F0 2F0 1F1 2B0 2F1 1B0 2B1 1B1
        """
    )


@looped("stages", range(1, 9))
@looped("microbatches", [1, 4, 8, 16])
def test_fresh_is_one_forward_one_backward(stages: int, microbatches: int) -> None:
    program = merged_compute(fresh(Grid(stages, microbatches)))
    assert tuple(program.values()) == SCHEDULES["1f1b"](stages, microbatches)


@looped("stages", range(2, 9))
@looped("microbatches", [4, 8, 16, 32])
def test_a_merged_worker_is_the_only_bottleneck(stages: int, microbatches: int) -> None:
    """It has 2M of forward and backward to do, and nobody can do better than to fill and drain the pipeline around."""
    for first in range(stages):
        ownership = _merged(Grid(stages, microbatches), first)
        length = dry_run(with_transfers(merged_compute(ownership), ownership), ownership).makespan
        assert length <= (2 * microbatches + stages - 2) * _FORWARD_AND_BACKWARD


@pytest.mark.parametrize("owners", [(0, 0, 0, 0), (0, 1, 1, 0), (2, 2, 3, 3), (0, 0, 0, 1)])
def test_each_slot_runs_all_in_order_and_keeps_no_more_than_it_would(owners: tuple[int, ...]) -> None:
    grid = Grid(4, 9)
    program = merged_compute(Ownership(grid, owners))
    for stage, owner in enumerate(owners):
        actions = [action for action in program[owner] if action.stage == stage]
        for op in (Op.F, Op.B):
            assert [each.microbatch for each in actions if each.op is op] == list(range(grid.microbatches))
        kept = [sum(1 if each.op is Op.F else -1 for each in actions[:end]) for end in range(len(actions) + 1)]
        assert max(kept) <= grid.stages - stage


def test_every_pipeline_is_scheduled() -> None:
    program = merged_compute(Ownership(Grid(2, 2, pipelines=2), (0, 1, 1, 0)))
    actions = sorted(action for line in program.values() for action in line)
    assert actions == sorted(
        Action(stage, op, each, d) for stage in (0, 1) for op in (Op.F, Op.B) for each in (0, 1) for d in (0, 1)
    )


def test_a_free_worker_takes_its_lowest_ready_task() -> None:
    # Task 0 waits for 3, on the other worker, so 1 goes first; then 0 is ready and goes before 2.
    assert starts([0, 0, 0, 1], [1, 2, 1, 2], [[3], [], [], []]) == ([1, 3, 0, 2], 4)


def test_tasks_in_a_circle_are_a_bug() -> None:
    with pytest.raises(InvariantError, match="circle"):
        starts([0, 1], [1, 1], [[1], [0]])


def in_runs(microbatches: int, *lengths: int) -> Ownership:
    """Returns the ownership in which worker n owns the nth run, of that many blocks."""
    owners = tuple(worker for worker, length in enumerate(lengths) for _ in range(length))
    return Ownership(Grid(len(owners), microbatches), owners)


def length_of(ownership: Ownership) -> float:
    """Returns the time of a step in list order."""
    return dry_run(with_transfers(merged_compute(ownership), ownership), ownership).makespan


def disagreement_of_runs(workers: int, blocks: int, microbatches: int) -> str:
    """Returns what the step of workers with as many blocks each has unlike 1F1B with one stage each; "" if nothing.

    The list scheduler gives the same actions in the same order as the schedule does with blocks.
    """
    ownership = in_runs(microbatches, *[blocks] * workers)
    program = merged_compute(ownership)
    run = dry_run(with_transfers(program, ownership), ownership)
    length = (microbatches + workers - 1) * _FORWARD_AND_BACKWARD * blocks
    stash = [min(microbatches, workers - worker) * blocks for worker in range(workers)]
    shape = f"{workers} workers with {blocks} blocks each, {microbatches} microbatches"
    if [*program.values()] != [in_blocks(line, blocks) for line in SCHEDULES["1f1b"](workers, microbatches)]:
        return f"{shape}: the list is another than that of the schedule"
    if (run.makespan, [*run.peak_stash.values()]) == (length, stash):
        return ""
    return f"{shape}: time {run.makespan}, stash {run.peak_stash}, instead of {length}, {stash}"


@looped("blocks", range(2, 9))
def test_runs_of_blocks_take_the_time_and_the_stash_of_one_forward_one_backward(blocks: int) -> None:
    """`make soak-formulas` has all of W in 2..16 and M in W..64."""
    for workers, microbatches in ((2, 2), (2, 7), (3, 8), (4, 5), (5, 10), (7, 7), (8, 12)):
        assert not disagreement_of_runs(workers, blocks, microbatches)


def test_a_window_in_slots_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of one slot each: a worker with several blocks would keep the microbatches of each."""
    monkeypatch.setattr(
        remaining_tasks,
        "in_flight",
        lambda ownership: {slot: ownership.grid.stages - slot[1] for slot in ownership.grid.slots()},
    )
    assert not disagreement_of_runs(4, 1, 8)
    assert "another" in disagreement_of_runs(4, 2, 8)


def test_two_neighbours_share_the_blocks_of_one_that_leaves() -> None:
    assert length_of(in_runs(8, 4, 4, 4)) == 120
    assert length_of(in_runs(8, 6, 6)) == 162
    assert length_of(in_runs(8, 8, 4)) == 192, "one neighbour alone"


def test_the_window_is_in_runs_and_one_more_where_a_run_is_twice_as_long_as_another() -> None:
    def windows(*owners: int) -> list[int]:
        return list(in_flight(Ownership(Grid(len(owners), 8), owners)).values())

    assert windows(0, 0, 1, 1, 2, 2) == [3, 3, 2, 2, 1, 1]
    assert windows(0, 0, 2, 3) == [4, 3, 2, 1], (
        "as with one slot each: its neighbour keeps what the dead one would have"
    )
    assert windows(0, 0, 0, 0, 1, 1) == [3, 3, 2, 2, 1, 1]
    assert windows(0, 0, 0, 1, 1) == [2, 2, 2, 1, 1]
    assert windows(0, 1, 1, 1, 1, 0) == [4, 3, 3, 3, 2, 1]


@pytest.mark.parametrize(("workers", "length"), [(8, 99), (7, 118), (6, 120), (5, 138), (4, 162)])
def test_fewer_workers_own_the_blocks_of_two_pipelines(workers: int, length: int) -> None:
    """Two pipelines of twelve layers; what eight workers do in 99."""
    grid = Grid(12, 8, pipelines=2)
    owners = tuple(place * workers // 24 for place in range(24))
    assert length_of(Ownership(grid, owners)) <= length


@looped("workers", range(3, 9))
def test_without_one_worker_the_others_share_its_work(workers: int) -> None:
    """Four blocks each; the longer runs come first, since the first runs wait least."""
    grid = Grid(4 * workers, 4 * workers)
    each, more = divmod(grid.stages, workers - 1)
    before = length_of(in_runs(grid.microbatches, *[4] * workers))
    after = length_of(in_runs(grid.microbatches, *[each + 1] * more, *[each] * (workers - 1 - more)))
    assert after <= 1.10 * workers / (workers - 1) * before


# What a death leaves to redo: what is gone, less what was streamed and what an eager shadow had run as well.


STEP = 6


def redo_of(events: list[dict[str, Any]], step: int, stage: int, fenced_ns: int, log_every: int = 0) -> Redo:
    return redo.redo_of(made_history(events).of(ActionRecord), step, stage, fenced_ns, log_every)


def ran(worker: int, *actions: str, step: int = STEP, at_ns: int = 10) -> list[dict[str, Any]]:
    return [
        {"event": "action", "worker": worker, "step": step, "action": each, "start_ns": at_ns - 1, "end_ns": at_ns}
        for each in actions
    ]


def sets(backwards: set[int], forwards: set[int], left: set[int]) -> Redo:
    return Redo(frozenset(backwards), frozenset(forwards), frozenset(left))


VICTIM = ran(2, "2F0", "2F1", "2B0", "2F2", "2B1")


def test_what_the_victim_had_done_of_the_step_is_to_be_redone() -> None:
    others = ran(1, "1F0", "1B0") + ran(2, "2F3", step=STEP - 1) + [{"event": "commit", "step": STEP}]
    assert redo_of(VICTIM + others, STEP, 2, 10) == sets({0, 1}, {0, 1, 2}, {0, 1, 2})


def test_a_forward_that_an_eager_shadow_had_run_is_not() -> None:
    shadow = ran(1, "2F0", "2F1") + ran(1, "2F2", at_ns=11)  # this one it ran after the fence
    assert redo_of(VICTIM + shadow, STEP, 2, 10) == sets({0, 1}, {0, 1, 2}, {2})


def test_what_was_streamed_is_not() -> None:
    streamed = VICTIM + ran(2, "2STREAM0")
    assert redo_of(streamed, STEP, 2, 10, log_every=1) == sets({1}, {1, 2}, {1, 2})
