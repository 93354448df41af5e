"""The search of schedules: what it finds can run, keeps to the limit, and is no longer than what has a name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from engine.core.action import Action, Op, make_action
from engine.core.job.job_rules import check_schedule
from engine.core.ownership import Grid, fresh
from engine.core.program.dry_run import dry_run, peak_stash
from engine.core.program.owners import on_owners
from engine.core.program.passes import with_transfers
from engine.core.program.schedule_csv import rows_to_csv
from engine.core.program.schedule_search import Profile, SearchResult, Shape, even_profile, length_of, search, searched

SHAPES = [(2, 1, 3), (3, 1, 6), (4, 1, 8), (4, 2, 8), (2, 3, 5), (8, 1, 16)]  # P, V, M
FEW = 50_000  # actions of the lists that are tried
SPREADS = {"even": 0.0, "mild": 0.2, "uneven": 0.6}


def drawing(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - no secret


def drawn(stages: int, spread: float, draw: random.Random) -> Profile:
    forward, for_input, for_weights = (
        tuple(draw.uniform(1 - spread, 1 + spread) for _ in range(stages)) for _ in range(3)
    )
    return Profile(forward, for_input, for_weights, (draw.choice([0.0, 0.05, 0.3]),) * (stages - 1))


def cases(shapes: list[tuple[int, int, int]], seeds: int) -> Iterator[tuple[int, int, int, Profile, float | None]]:
    for seed in range(seeds):
        draw = drawing(seed)
        p, v, m = shapes[seed % len(shapes)]
        yield p, v, m, drawn(p * v, [*SPREADS.values()][seed % 3], draw), draw.choice([None, 1, p / 2 + 1, p])


def best_named(found: SearchResult) -> float:
    return min((row.length for row in found.rows if row.fits and row.schedule != "found"), default=inf)


def test_what_is_found_runs_as_long_as_said_and_keeps_to_the_limit() -> None:
    for number, (p, v, m, profile, memory) in enumerate(cases(SHAPES, 18)):
        slices = max(1, number - 10) if number % 2 else 1
        found = searched(p * v, v, m, profile, memory, FEW, slices)
        row = next(row for row in found.rows if row.schedule == "found")
        assert check_schedule(rows_to_csv(found.lists), p * v, v, m * slices, row.placement, slices) == []
        ownership = fresh(Grid(p * v, m * slices, slices=slices), v, row.placement)
        program = with_transfers(on_owners(found.lists, ownership), ownership)
        run = dry_run(program, ownership, profile.cost, latency=max(profile.transfer))
        assert row.length == pytest.approx(run.makespan)
        assert row.stash == max(map(peak_stash, found.lists)) / v / slices
        assert row.stash <= (memory or inf)
        assert found.least - 1e-9 <= row.length <= best_named(found) + 1e-9


def test_it_is_the_same_again() -> None:
    profile = drawn(8, 0.6, drawing(1))
    assert searched(8, 2, 8, profile, 2, FEW) == searched(8, 2, 8, profile, 2, FEW)


def test_little_memory_is_used_better_than_by_any_name() -> None:
    """A limit between V-Min and V-Half leaves V-Min; the search uses the rest. A lone microbatch just passes."""
    found = searched(16, 2, 16, even_profile(16, 1, 1, 1, 0), 5, FEW)
    assert found.rows[0].schedule == "found"
    assert found.rows[0].length < 0.98 * best_named(found)
    assert searched(4, 1, 3, even_profile(4, 1, 1, 1, 0), 1).rows[0].length == 3 * 8 + 3


def test_each_schedule_has_the_stash_that_stays_on_a_measured_link() -> None:
    profile = even_profile(4, 1, 1, 1, 0)
    assert {row.offloaded for row in searched(4, 1, 16, profile, steps=FEW).rows} == {None}
    rows = {row.schedule: row for row in searched(4, 1, 16, replace(profile, copy_time=0.25), steps=FEW).rows}
    assert (rows["gpipe"].stash, rows["gpipe"].offloaded) == (16, 3)
    assert all(row.offloaded is not None and row.offloaded <= row.stash for row in rows.values())


def test_slices_pass_where_a_lone_microbatch_just_passes() -> None:
    """The backward of its last slice comes first, so all slices of a microbatch have room on all stages of a worker."""
    found = searched(8, 2, 4, even_profile(8, 1, 1, 1, 0).times(1 / 4), 1, FEW, slices=4)
    assert found.rows[0].schedule == "found" and (found.rows[0].fits, found.rows[0].stash) == (True, 1)
    whole = searched(8, 2, 4, even_profile(8, 1, 1, 1, 0), 1, FEW)
    assert found.rows[0].length < 0.7 * whole.rows[0].length


def orders(stage: int, microbatches: int) -> list[tuple[Action, ...]]:
    """Returns every order of F, I and W of a stage in which microbatches keep their order."""
    lines: list[tuple[Action, ...]] = []

    def go_on(line: tuple[Action, ...], f: int, i: int, w: int) -> None:
        if w == microbatches:
            lines.append(line)
        if f < microbatches:
            go_on((*line, make_action(stage, Op.F, f)), f + 1, i, w)
        if i < f:
            go_on((*line, make_action(stage, Op.I, i)), f, i + 1, w)
        if w < i:
            go_on((*line, make_action(stage, Op.W, w)), f, i, w + 1)

    go_on((), 0, 0, 0)
    return lines


@pytest.mark.parametrize(("p", "m", "stash"), [(2, 3, 3), (2, 3, 2), (3, 2, 2), (2, 3, 1)])
def test_it_comes_within_three_percent_of_the_best_of_all(p: int, m: int, stash: int) -> None:
    """Of every list of a worker, with every list of the others."""
    lines = [[line for line in orders(stage, m) if peak_stash(line) <= stash] for stage in range(p)]
    for seed in range(3):
        profile = drawn(p, 0.6, drawing(seed))
        best = min(length_of(lists, profile) for lists in product(*lines))
        found = length_of(search(Shape(p, 1, m, "loop", stash), profile, steps=FEW), profile)
        assert best - 1e-9 <= found <= 1.03 * best, (seed, found / best)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_profiles() -> None:
    """Prints how much is won over the best name, by the spread of the costs."""
    gains: dict[str, list[float]] = {name: [] for name in SPREADS}
    for number, (p, v, m, profile, memory) in enumerate(cases([*SHAPES, (4, 2, 16), (8, 1, 32), (4, 1, 32)], 200)):
        found = searched(p * v, v, m, profile, memory)
        row = next(row for row in found.rows if row.schedule == "found")
        gains[[*SPREADS][number % 3]].append(best_named(found) / row.length)
        assert gains[[*SPREADS][number % 3]][-1] >= 1 - 1e-9
    for name, ratios in gains.items():
        finite = sorted(ratio for ratio in ratios if ratio < inf)
        print(
            name,
            f"median {finite[len(finite) // 2]:.3f}, most {finite[-1]:.3f};",
            len(ratios) - len(finite),
            "without a name",
        )
