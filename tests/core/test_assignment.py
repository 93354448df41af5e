"""The policy of owners: the shortest step that pays for its moves, runs that are whole, and memory that suffices."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, pairwise, permutations

import pytest

from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.dry_run import dry_run
from engine.core.program.passes import with_transfers
from engine.core.program.remaining_tasks import merged_compute
from engine.core.protocol import assignment
from engine.core.protocol.assignment import Assignment, ScheduleOrder, assign, runs_of, step_time
from engine.core.protocol.measured_facts import MeasuredFacts
from tests.looped import looped

MB = 10**6


def dealt(grid: Grid, num_workers: int) -> Ownership:
    """Returns the ownership in which workers have runs of one length, in the order of their numbers."""
    length = len(grid.slots()) // num_workers
    return Ownership(grid, tuple(place // length for place in range(len(grid.slots()))))


def makespan(owners: tuple[int, ...], grid: Grid) -> float:
    """Returns the time of a step by a dry run of the program, in units."""
    ownership = Ownership(grid, owners)
    return dry_run(with_transfers(merged_compute(ownership), ownership), ownership).makespan


def are_whole(owners: tuple[int, ...], grid: Grid) -> bool:
    """Returns whether no worker has two runs in a pipeline."""
    return all(len({run.worker for run in line}) == len(line) for line in runs_of(owners, grid))


def broken(grid: Grid, workers: list[int], measured: MeasuredFacts, found: Assignment) -> list[str]:
    """Returns the rules that an assignment breaks."""
    problems = [f"worker {each} may not own" for each in {*found.owners} - {*workers}]
    problems += [] if are_whole(found.owners, grid) else ["a worker has two runs in a pipeline"]
    for worker in measured.memory:
        places = [place for place, owner in enumerate(found.owners) if owner == worker]
        if sum(measured.owned_bytes[place % grid.stages] for place in places) > measured.memory[worker]:
            problems.append(f"worker {worker} has too little memory")
    return problems


def drawn_case(seed: int) -> tuple[Ownership, list[int], MeasuredFacts]:
    """Returns an ownership, the workers that may own after deaths and joins, and facts about them."""
    rng = random.Random(seed)  # noqa: S311
    pipelines, per_pipeline, blocks = rng.choice([1, 1, 2, 3]), rng.randint(1, 4), rng.randint(1, 4)
    grid = Grid(per_pipeline * blocks, rng.choice([2, 8]), pipelines)
    num_workers = pipelines * per_pipeline
    workers = rng.sample(range(num_workers + 2), rng.randint(max(1, num_workers - 2), num_workers + 1))
    forward = tuple(rng.uniform(0.5, 2) for _ in range(grid.stages))
    needs = tuple(rng.randint(1, 3) * MB for _ in range(grid.stages))
    share = sum(needs) * pipelines / len(workers)
    measured = MeasuredFacts(
        forward_s=forward if seed % 2 else (),
        backward_s=tuple(2 * each for each in forward) if seed % 2 else (),
        speed={worker: rng.choice([0.5, 1.0, 1.0]) for worker in workers},
        replica_bytes=needs,
        owned_bytes=needs,
        memory={worker: int(share * rng.uniform(0.4, 1.6)) + MB for worker in workers if rng.random() < 0.5},
        host_of={worker: f"host-{worker % 2}" for worker in workers},
    )
    return dealt(grid, num_workers), workers, measured


def offences(seeds: range) -> Iterator[str]:
    for seed in seeds:
        ownership, workers, measured = drawn_case(seed)
        found = assign(ownership, workers, measured)
        if "memory is ignored" not in found.why:
            yield from broken(ownership.grid, workers, measured, found)
        if assign(ownership, workers[::-1], measured).owners != found.owners:
            yield "the order of the workers counts"


def test_no_rule_is_broken() -> None:
    assert list(offences(range(30))) == []


def test_a_cut_is_the_cheapest_of_all_and_then_the_most_even() -> None:
    compared = 0
    for seed in range(400):
        ownership, workers, measured = drawn_case(seed)
        num_slots, rng = len(ownership.owners), random.Random(seed)  # noqa: S311
        if not 4 < num_slots <= 8 or not 2 < len(workers) <= 5:
            continue
        whole = {worker: rng.sample(ownership.grid.slots(), num_slots // 3) for worker in workers}
        options = assignment._Options(ownership, measured, whole, len(workers), ScheduleOrder())
        keep = rng.sample(workers, seed % 3)
        row = assignment._Row(options, workers, keep)
        if (least := row.least_limit()) is None:
            continue
        limit = rng.choice((1.0, 1.5)) * least
        scores = {}
        for borders in combinations_with_replacement(range(num_slots + 1), len(workers) - 1):
            pieces = [*pairwise((0, *borders, num_slots))]
            if all(
                begin + row.least[at] <= end <= row._reach(at, begin, limit) for at, (begin, end) in enumerate(pieces)
            ):
                owners = tuple(workers[at] for at, (begin, end) in enumerate(pieces) for _ in range(begin, end))
                speeds, price = map(measured.speed_of, workers), sum(map(options.price, owners, range(num_slots)))
                loads = [(row.work[end] - row.work[begin]) / next(speeds) for begin, end in pieces]
                scores[owners] = price, sum(load * load for load in loads)
        for width in (1, 4):
            assert scores[row.cut(limit, width)] == pytest.approx(min(scores.values()))
        compared += 1
    assert compared > 20


def test_what_is_looked_at_after_a_death_grows_with_the_workers_and_not_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, price = Counter[int](), assignment._Options.price

    def counted(options: assignment._Options, worker: int, place: int) -> int:
        looked[len(options.present)] += 1
        return price(options, worker, place)

    monkeypatch.setattr(assignment._Options, "price", counted)
    for workers in (32, 128):
        for blocks in (1, 3):
            owners = [place // blocks for place in range(workers * blocks)]
            owners[workers * blocks // 2 : (workers // 2 + 1) * blocks] = [workers // 2 - 1] * blocks
            staying = [worker for worker in range(workers) if worker != workers // 2]
            assign(Ownership(Grid(workers * blocks, 4), tuple(owners)), staying)
    assert looked[128] < 5 * looked[32] and looked[384] < 5 * looked[96]


def test_a_policy_that_reads_the_order_of_its_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "sorted", lambda each, key=None: list(each), raising=False)
    monkeypatch.setattr(assignment, "in_order", lambda present, workers, measured: list(workers))
    assert "the order of the workers counts" in offences(range(40))


def test_a_policy_that_splits_runs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = assignment.in_order
    monkeypatch.setattr(assignment, "in_order", lambda *given: [*(order := in_order(*given)), order[0]])
    assert "a worker has two runs in a pipeline" in offences(range(40))


def test_a_policy_that_ignores_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeasuredFacts, "needed_bytes", lambda *_: 0)
    assert any("too little memory" in each for each in offences(range(40)))


def test_the_answer_is_the_same_in_every_process() -> None:
    code = """
from engine.core.protocol.assignment import MeasuredFacts, assign
from engine.core.ownership import Grid, Ownership
owners = tuple(place // 3 for place in range(24))
hosts = {worker: f"host-{worker % 3}" for worker in range(9)}
print(assign(Ownership(Grid(12, 8, 2), owners), {0, 1, 8, 3, 5, 6, 7}, MeasuredFacts(host_of=hosts, speed={3: 0.5})))
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout != b""


def test_a_leaver_in_the_middle_goes_to_both_neighbours() -> None:
    grid = Grid(12, 8)
    found = assign(dealt(grid, 3), [0, 2])
    assert found.owners == (*[0] * 6, *[2] * 6)
    assert (
        found.why
        == "4 stages of 12 move: a step is predicted to take 162 units instead of 120; worker 1 owns none any more"
    )
    assert makespan(found.owners, grid) == 162


def test_the_words_of_a_move_count_the_slots_of_each_pipeline() -> None:
    found = assign(dealt(Grid(12, 8, 2), 8), [0, 1, 2, 4, 5, 6, 7])
    changed = [place // 12 for place in range(24) if found.owners[place] != place // 3]
    told = [f"{changed.count(each)} of pipeline {each}" for each in (0, 1) if each in changed]
    assert found.why.startswith(f"{len(changed)} stages of 24 move ({', '.join(told)}): a step is predicted to take ")


@pytest.mark.parametrize("taken_over", [(2, 2, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2), (0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0)])
def test_two_runs_of_a_worker_stay_where_one_would_make_the_step_longer(taken_over: tuple[int, ...]) -> None:
    """The first or the last of three workers has died: 4 or 8 blocks moved, and a step took 162 units from then on."""
    ownership = Ownership(Grid(12, 8, blocks=4), taken_over)
    found = assign(ownership, {*taken_over})
    assert found.owners == taken_over
    assert found.why.startswith("nothing moves: ")
    assert makespan(taken_over, ownership.grid) <= 158 < makespan((*[1] * 6, *[2] * 6), ownership.grid) == 162


def test_two_runs_of_a_worker_become_one_where_that_pays() -> None:
    taken_over = (0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 0)
    ownership = Ownership(Grid(12, 8, blocks=3), taken_over)
    found = assign(ownership, [0, 1, 2])
    assert are_whole(found.owners, ownership.grid)
    assert makespan(found.owners, ownership.grid) == 120 < makespan(taken_over, ownership.grid)


@looped("num_workers", range(3, 9))
@looped("rounds", [1, 4, 8])
def test_one_worker_less_costs_little_more_than_its_share(num_workers: int, rounds: int) -> None:
    """Whichever it is; of the more microbatches, the more it costs."""
    grid = Grid(4 * num_workers, rounds * num_workers, blocks=4)
    ownership = dealt(grid, num_workers)
    most = 1.10 * num_workers / (num_workers - 1) * makespan(ownership.owners, grid)
    for lost in range(num_workers):
        found = assign(ownership, [worker for worker in range(num_workers) if worker != lost])
        assert makespan(found.owners, grid) <= most


@pytest.mark.parametrize("seed", range(4))
def test_two_pipelines_shrink_and_grow(seed: int) -> None:
    """Of 2 x 4 workers over twelve layers some go and others come; each number of them has its longest step."""
    grid, rng = Grid(12, 8, 2), random.Random(seed)  # noqa: S311
    ownership, members = dealt(grid, 8), list(range(8))
    for number, size in enumerate((7, 6, 5, 4, 5, 6, 7, 8)):
        if size < len(members):
            members.remove(rng.choice(members))
        else:
            members.append(8 + number)
        ownership = Ownership(grid, assign(ownership, members).owners)
        assert makespan(ownership.owners, grid) <= {8: 99, 7: 120, 6: 120, 5: 141, 4: 162}[size]
        assert {*ownership.owners} <= {*members}


def test_a_joiner_takes_a_full_share() -> None:
    grid = Grid(32, 32)
    ownership = Ownership(grid, assign(dealt(grid, 8), [0, 1, 2, 4, 5, 6, 7]).owners)
    found = assign(ownership, [0, 1, 2, 4, 5, 6, 7, 8])
    assert found.owners.count(8) == 4
    assert found.why.endswith("; worker 8 is a new owner")
    assert makespan(found.owners, grid) == makespan(dealt(grid, 8).owners, grid)


def best_of_all(num_workers: int, grid: Grid, measured: MeasuredFacts) -> float:
    """Returns the shortest step over all orders of workers and all cuts, of one pipeline."""
    return min(
        step_time(
            tuple(worker for worker, (a, b) in zip(order, pairwise(ends), strict=True) for _ in range(a, b)),
            grid,
            measured,
        )
        for used in range(1, num_workers + 1)
        for order in permutations(range(num_workers), used)
        for ends in ((0, *inner, grid.stages) for inner in combinations(range(1, grid.stages), used - 1))
    )


@looped("seed", range(25))
def test_a_slow_worker_leaves_an_assignment_near_the_best(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    num_workers, blocks = rng.choice([(2, 2), (2, 4), (3, 1), (3, 2), (3, 3)])
    grid = Grid(num_workers * blocks, num_workers * rng.choice([2, 4]))
    forward = tuple(rng.uniform(0.5, 2) for _ in range(grid.stages))
    slow = {rng.randrange(num_workers): 0.5}
    measured = MeasuredFacts(forward, tuple(2 * each for each in forward), speed=slow, pause_s=0.0, bytes_per_s=1e12)
    found = assign(dealt(grid, num_workers), range(num_workers), measured)
    assert step_time(found.owners, grid, measured) <= 1.15 * best_of_all(num_workers, grid, measured)


def test_the_estimate_is_near_the_dry_run_of_the_program() -> None:
    for seed in range(0, 40, 2):
        ownership, workers, _ = drawn_case(seed)
        owners = assign(ownership, workers).owners
        measured = step_time(owners, ownership.grid, MeasuredFacts())
        assert measured == pytest.approx(makespan(owners, ownership.grid), rel=0.12)


def seconds(grid: Grid, each_s: float, **facts: object) -> MeasuredFacts:
    stages = grid.stages
    return MeasuredFacts((each_s,) * stages, (2 * each_s,) * stages, replica_bytes=(100 * MB,) * stages, **facts)  # type: ignore[arg-type]


def test_slots_move_only_if_a_hundred_steps_pay_for_it() -> None:
    grid, slow = Grid(8, 8), {1: 0.5}
    ownership = dealt(grid, 2)
    moves = assign(ownership, [0, 1], seconds(grid, 0.01, speed=slow))
    assert moves.owners.count(1) < 4
    assert ", 200 MB are copied: " in moves.why or ", 100 MB are copied: " in moves.why
    assert ", which pays in 1 step" in moves.why
    rate = assign(ownership, [0, 1], seconds(grid, 0.01, speed=slow, bytes_per_s=2e9)).why
    assert " are copied, at 2 GB/s as the last ones: " in rate
    stays = assign(ownership, [0, 1], seconds(grid, 0.01, speed=slow, bytes_per_s=1e6))
    assert stays.owners == ownership.owners
    assert "would not pay for the move in 100 steps" in stays.why
    assert stays.gain == 0


def test_replicas_that_are_there_draw_the_slots() -> None:
    """One neighbour has whole replicas of all the leaver's slots: it takes more than its share if the net is slow."""
    grid = Grid(12, 8)
    whole: dict[int, list[Slot]] = {0: [(0, stage) for stage in range(4, 8)]}
    fast = assign(dealt(grid, 3), [0, 2], seconds(grid, 0.001), whole)
    slow = assign(dealt(grid, 3), [0, 2], seconds(grid, 0.001, bytes_per_s=1e6), whole)
    assert fast.owners == (*[0] * 6, *[2] * 6)
    assert slow.owners == (*[0] * 8, *[2] * 4)


def test_nothing_moves_without_a_reason() -> None:
    for grid, num_workers in ((Grid(12, 8), 3), (Grid(12, 8, 2), 8), (Grid(7, 8), 7)):
        ownership = dealt(grid, num_workers)
        found = assign(ownership, range(num_workers))
        assert found.owners == ownership.owners
        assert found.why.startswith("nothing moves: a step is predicted to take ")


def test_a_worker_with_too_little_memory_for_one_slot_gets_none() -> None:
    grid = Grid(12, 8)
    measured = MeasuredFacts(owned_bytes=(30 * MB,) * 12, memory={3: 20 * MB})
    found = assign(dealt(grid, 3), range(4), measured)
    assert 3 not in found.owners
    assert found.why.endswith("worker 3 gets no stage: one takes 30 MB, and it has 20 MB")


def test_memory_that_suffices_for_no_cut_is_told_and_the_job_goes_on() -> None:
    grid = Grid(12, 8)
    measured = MeasuredFacts(owned_bytes=(30 * MB,) * 12, memory=dict.fromkeys(range(3), 100 * MB))
    found = assign(dealt(grid, 3), [0, 1], measured)
    assert broken(grid, [0, 1], MeasuredFacts(), found) == []
    assert "all workers together have too little memory" in found.why


def test_a_joiner_stands_beside_workers_of_its_host() -> None:
    grid = Grid(8, 8)
    hosts = {0: "a", 1: "b", 2: "a"}
    found = assign(dealt(grid, 2), range(3), MeasuredFacts(host_of=hosts))
    order = list(dict.fromkeys(found.owners))
    assert order.index(2) in (order.index(0) - 1, order.index(0) + 1)


def test_a_whole_pipelines_worth_of_workers_joins_every_pipeline_however_many_there_are() -> None:
    """The transfers of one pipeline do not wait for those of another: the workers of a large job share it out."""
    for pipelines in (2, 4):
        grid = Grid(32, 16, pipelines, blocks=4)
        before = dealt(grid, 8 * pipelines)
        found = assign(before, range(32 * pipelines))
        assert {*found.owners} == {*range(32 * pipelines)}, found.why
        assert found.gain > 0.4
