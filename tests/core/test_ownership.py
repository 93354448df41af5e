"""Who owns what, and who shadows it: the placement of shadows, against tables."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.ownership import Grid, Ownership, Redundancy, fresh, with_shadows
from tests.core.machine import drawn_by
from tests.looped import looped

Shadows = tuple[tuple[int, ...], ...]


def fresh_of(num_stages: int, num_pipelines: int = 1) -> Ownership:
    """Returns the ownership of a fresh job."""
    return fresh(Grid(num_stages, 4, num_pipelines))


def shadows_of(
    ownership: Ownership, redundancy: Redundancy = "lazy", level: int = 1, leaving: tuple[int, ...] = ()
) -> Shadows:
    """Returns the shadows of each slot, placed among the workers of the ownership."""
    return with_shadows(ownership, redundancy, level, ownership.workers(), leaving).shadows


def test_who_has_what() -> None:
    ownership = Ownership(Grid(2, 1, pipelines=2, ties=((0, 1),)), (3, 0, 2, 0), ((0,), (3, 2), (), (2,)))
    assert [ownership.owner(*slot) for slot in ownership.grid.slots()] == [3, 0, 2, 0]
    assert ownership.shadows_of(0, 1) == (3, 2)
    assert ownership.replicas(0, 1) == (0, 3, 2)
    assert ownership.slots_of(0) == ((0, 1), (1, 1))
    assert ownership.shadowed_by(2) == ((0, 1), (1, 1))
    assert ownership.pipelines_of(0, 1) == (0, 1)
    assert ownership.pipelines_of(3, 1) == ()
    assert ownership.owners_of(1) == (0,)
    assert ownership.owners_of(0) == (3, 2)
    assert ownership.workers() == (0, 2, 3)
    assert ownership.grid.tied_to(1) == (0,)
    assert fresh_of(2).replicas(0, 1) == (1,)


@looped("num_stages", range(2, 9))
def test_on_a_fresh_grid_the_owner_of_a_stage_shadows_the_next_one(num_stages: int) -> None:
    ring = tuple(((stage - 1) % num_stages,) for stage in range(num_stages))
    assert shadows_of(fresh_of(num_stages)) == ring
    assert shadows_of(fresh_of(num_stages), "eager") == ring


def test_pipelines_keep_to_themselves_on_a_fresh_grid() -> None:
    assert shadows_of(fresh_of(3, 2)) == ((2,), (0,), (1,), (5,), (3,), (4,))


def test_workers_are_numbered_as_they_please() -> None:
    assert shadows_of(Ownership(Grid(3, 1), (7, 2, 5))) == ((5,), (7,), (2,))


def test_the_only_stage_is_shadowed_by_another_pipeline() -> None:
    assert shadows_of(fresh_of(1, 2)) == ((1,), (0,))
    assert shadows_of(fresh_of(1, 3)) == ((1,), (2,), (0,))


def test_the_only_worker_has_no_shadow_until_another_one_comes() -> None:
    assert shadows_of(fresh_of(1)) == ((),)
    assert with_shadows(fresh_of(1), "lazy", 1, (0, 6)).shadows == ((6,),)


def test_level_two_keeps_the_two_that_precede() -> None:
    assert shadows_of(fresh_of(4), level=2) == ((3, 2), (0, 3), (1, 0), (2, 1))
    assert shadows_of(fresh_of(2), level=2) == ((1,), (0,))  # there is nobody else


def test_after_a_merge_another_worker_shadows_and_the_least_loaded_one() -> None:
    # Worker 1 is gone, worker 0 owns its stage too: it cannot shadow stage 1, and has most to do.
    merged = Ownership(Grid(4, 1), (0, 0, 2, 3), ((3,), (), (), (2,)))
    assert shadows_of(merged) == ((3,), (3,), (3,), (2,))
    # Of the others each has one slot; worker 3 shadows stage 0 already, so worker 2 takes the next.
    assert shadows_of(Ownership(Grid(4, 1), (0, 0, 2, 3))) == ((3,), (2,), (3,), (2,))


def in_runs(*lengths: int) -> Ownership:
    """Returns the ownership in which worker n owns the nth run, of that many blocks."""
    owners = tuple(worker for worker, length in enumerate(lengths) for _ in range(length))
    return Ownership(Grid(len(owners), 4, blocks=max(lengths)), owners)


def without(gone: int, ownership: Ownership) -> tuple[int, ...]:
    """Returns the owners after a worker has died."""
    first = [line[0] for line in ownership.shadows]
    return tuple(heir if owner == gone else owner for owner, heir in zip(ownership.owners, first, strict=True))


def test_the_owners_of_the_runs_beside_a_run_shadow_half_of_it_each() -> None:
    ownership = with_shadows(in_runs(4, 4, 4), "lazy", 1, range(3))
    halves = [(2,), (2,), (1,), (1,)], [(0,), (0,), (2,), (2,)], [(1,), (1,), (0,), (0,)]
    assert ownership.shadows == tuple(line for half in halves for line in half)
    assert without(1, ownership) == (0,) * 6 + (2,) * 6
    assert without(0, ownership) == (2, 2) + (1,) * 6 + (2,) * 4, "the first and the last run are neighbours"
    assert ownership.run_of(0, 5) == range(4, 8)


def test_the_middle_slot_of_a_run_goes_to_the_less_loaded_side() -> None:
    assert shadows_of(in_runs(3, 3, 1)) == ((2,), (2,), (1,), (0,), (2,), (2,), (1,))
    assert shadows_of(in_runs(2, 2, 2), level=2)[:2] == ((2, 1), (1, 2))


def test_a_run_without_a_run_beside_it_is_shadowed_by_other_pipelines_or_workers() -> None:
    whole, twice = Grid(2, 1, pipelines=2, blocks=2), Grid(4, 1, pipelines=2, blocks=2)
    assert shadows_of(Ownership(whole, (0, 0, 1, 1))) == ((1,), (1,), (0,), (0,))
    assert shadows_of(Ownership(twice, (0, 0, 1, 1, 2, 2, 3, 3)))[:4] == ((1,), (3,), (0,), (2,))
    assert with_shadows(in_runs(3), "lazy", 1, (0, 7)).shadows == ((7,), (7,), (7,))


def test_half_of_a_run_whose_neighbour_leaves_goes_to_the_next_run_on_that_side() -> None:
    assert shadows_of(in_runs(2, 2, 2, 2), leaving=(1,))[4:6] == ((0,), (3,))


@pytest.mark.parametrize(("workers", "per_host", "blocks"), [(8, 2, 1), (8, 4, 1), (12, 3, 1), (6, 2, 4), (8, 2, 3)])
def test_no_slot_has_all_its_replicas_on_one_host_while_there_are_others(
    workers: int, per_host: int, blocks: int
) -> None:
    """Hosts are lost one by one; the next one after new shadows are whole."""
    host_of = {worker: f"host-{worker // per_host}" for worker in range(workers)}
    for first in range(workers // per_host):
        ownership, members = in_runs(*[blocks] * workers), {*host_of}
        for lost in range(first, first + workers // per_host - 1):
            ownership = with_shadows(ownership, "lazy", 1, members, host_of=host_of)
            members -= {each for each in members if host_of[each] == f"host-{lost % (workers // per_host)}"}
            heirs = [[each for each in ownership.replicas(*slot) if each in members] for slot in ownership.grid.slots()]
            assert all(heirs)
            owners = tuple(line[0] for line in heirs)
            shadows = tuple(tuple(line[1:]) for line in heirs)
            ownership = Ownership(ownership.grid, owners, shadows)


def test_where_all_workers_are_on_one_host_hosts_do_not_count() -> None:
    one = dict.fromkeys(range(4), "host")
    assert with_shadows(fresh_of(4), "lazy", 1, range(4), host_of=one) == with_shadows(fresh_of(4), "lazy", 1, range(4))


def test_two_that_own_everything_shadow_each_other() -> None:
    assert shadows_of(Ownership(Grid(4, 1), (0, 0, 0, 1))) == ((1,), (1,), (1,), (0,))


def test_a_shadow_that_lives_stays() -> None:
    ownership = Ownership(Grid(3, 1), (0, 1, 2), ((1,), (), (0,)))
    assert shadows_of(ownership) == ((1,), (2,), (0,))
    assert shadows_of(ownership, level=2) == ((1, 2), (0, 2), (0, 1))


def test_a_wanted_owner_is_a_shadow_first_and_the_surplus_goes_when_its_slot_has_moved() -> None:
    ring = Ownership(Grid(3, 1), (0, 1, 2), ((2,), (0,), (1,)))
    healing = with_shadows(ring, "lazy", 1, range(3), (), (1, 1, 2))
    assert healing.shadows == ((2, 1), (0,), (1,))
    moved = Ownership(Grid(3, 1), (1, 1, 2), ((2, 0), (0,), (1,)))
    assert with_shadows(moved, "lazy", 1, range(3)).shadows == ((2,), (0,), (1,))
    alone = Ownership(Grid(3, 1), (0, 1, 2))
    assert with_shadows(alone, "lazy", 1, range(3), (), (1, 2, 0)).shadows == ((1,), (2,), (0,))
    healing = with_shadows(alone, "none", 0, range(3), (), (1, 1, 7))
    assert healing.shadows == ((1,), (), ()), "worker 7 is no member"
    assert with_shadows(Ownership(Grid(3, 1), (1, 1, 2), ((0,), (), ())), "none", 0, range(3)).shadows == ((), (), ())


def test_who_is_leaving_gets_no_new_shadow_role() -> None:
    for leaver in range(4):
        placed = shadows_of(fresh_of(4), leaving=(leaver,))
        assert all(len(line) == 1 and leaver not in line for line in placed)
        assert all(owner not in line for owner, line in enumerate(placed))


def test_who_is_leaving_keeps_what_it_shadows_and_another_one_comes_first() -> None:
    ring = with_shadows(fresh_of(3), "lazy", 1, range(3))
    healing = with_shadows(ring, "lazy", 1, range(3), leaving=(1,))
    assert ring.shadows == ((2,), (0,), (1,))
    assert healing.shadows == ((2,), (0,), (0, 1))
    assert with_shadows(healing, "lazy", 1, range(3), leaving=(1,)) == healing


def test_members_alone_are_taken() -> None:
    assert with_shadows(fresh_of(3), "lazy", 1, (0, 1)).shadows == ((1,), (0,), (1,))


def test_none_places_nobody() -> None:
    assert with_shadows(fresh_of(4), "none", 1, range(4)) == fresh_of(4)
    assert with_shadows(fresh_of(2, 2), "none", 3, range(4)).shadows == ()


def test_reroute_places_nobody_while_another_pipeline_holds_the_stage() -> None:
    assert shadows_of(fresh_of(3, 2), "reroute") == ((),) * 6
    assert shadows_of(fresh_of(1, 3), "reroute") == ((),) * 3


def test_reroute_heals_a_stage_that_only_one_worker_has_left() -> None:
    # Worker 4, which owned stage 1 of pipeline 1, is gone; worker 1 owns stage 1 in both. One shadow saves both.
    left = Ownership(Grid(3, 1, pipelines=2), (0, 1, 2, 3, 1, 5))
    placed = shadows_of(left, "reroute")
    assert placed == ((), (0,), (), (), (), ())
    assert with_shadows(left, "reroute", 1, left.workers()) == with_shadows(
        with_shadows(left, "reroute", 1, left.workers()), "reroute", 1, left.workers()
    )


def test_reroute_does_not_count_on_who_is_leaving() -> None:
    placed = shadows_of(fresh_of(2, 2), "reroute", leaving=(3,))
    assert placed == ((), (0,), (), ())


@st.composite
def any_ownership(draw: st.DrawFn) -> Ownership:
    """An ownership with or without a few shadows."""
    grid = Grid(draw(st.integers(1, 5)), 1, draw(st.integers(1, 3)))
    num_slots = grid.stages * grid.pipelines
    order = drawn_by(draw(st.integers(0, 2**32)))
    owners = tuple(order.randrange(num_slots) for _ in range(num_slots))
    shadows = tuple(
        tuple(each for each in order.sample(range(num_slots), order.randint(0, min(1, num_slots))) if each != owner)
        for owner in owners
    )
    return Ownership(grid, owners, shadows)


@given(
    any_ownership(),
    st.sampled_from(("lazy", "eager", "reroute")),
    st.integers(1, 2),
    st.sets(st.integers(0, 14)),
    st.tuples(*[st.integers(0, 5)] * 15),
)
def test_every_placement_is_of_others_and_as_large_as_it_can_be(
    ownership: Ownership, redundancy: Redundancy, level: int, leaving: set[int], wanted: tuple[int, ...]
) -> None:
    members = sorted({*ownership.workers(), *range(3)})
    wanted = wanted[: len(ownership.owners)]
    placed = with_shadows(ownership, redundancy, level, members, sorted(leaving), wanted)
    assert with_shadows(placed, redundancy, level, members, sorted(leaving), wanted) == placed
    assert (placed.grid, placed.owners) == (ownership.grid, ownership.owners)
    staying = {each for each in members if each not in leaving}
    for slot in ownership.grid.slots():
        owner, line = placed.owner(*slot), placed.shadows_of(*slot)
        before = ownership.shadows_of(*slot)
        assert owner not in line
        assert len({*line}) == len(line)
        assert {*before}.intersection(leaving) <= {*line} <= staying | {*before}
        others = {each for d in range(ownership.grid.pipelines) for each in placed.replicas(d, slot[1])}
        held = {*line} if redundancy != "reroute" else others - {owner}
        count = level if redundancy != "reroute" else 1
        assert len(held & staying) >= min(count, len(staying - {owner}))
        whole = {each for d in range(ownership.grid.pipelines) for each in ownership.replicas(d, slot[1])}
        safe = whole & staying - {owner} if redundancy == "reroute" else {*before} & staying
        kept = (whole if redundancy == "reroute" else {*before}) & held & staying
        assert len(kept) >= min(count, len(safe)), "a shadow was dropped before another one is whole"
        wants = wanted[ownership.grid.place(slot)]
        assert wants in (owner, *line) or wants not in staying


_PRINTS_PLACEMENTS = """
from engine.core.ownership import Grid, Ownership, with_shadows
for redundancy in ("lazy", "reroute"):
    for level in (1, 2):
        owned = Ownership(Grid(4, 1, pipelines=2), (10, 10, 31, 4, 55, 31, 31, 17))
        print(with_shadows(owned, redundancy, level, {10, 31, 4, 55, 17, 99, 1000}, {17}).shadows)
"""


def test_no_placement_depends_on_the_order_of_a_set() -> None:
    """Integers hash to themselves, but what a set yields also depends on how it has grown."""
    members = [10, 31, 4, 55, 17, 99, 1000]
    ownership = Ownership(Grid(4, 1, pipelines=2), (10, 10, 31, 4, 55, 31, 31, 17))
    policies: tuple[Redundancy, ...] = ("lazy", "reroute")
    for redundancy, level in itertools.product(policies, (1, 2)):
        found = {
            with_shadows(ownership, redundancy, level, order, leaving).shadows
            for order in (members, members[::-1], {*members}, {*range(2000)} & {*members})
            for leaving in ((17, 4), (4, 17), {4, 17})
        }
        assert len(found) == 1
    texts = {
        subprocess.run(
            [sys.executable, "-c", _PRINTS_PLACEMENTS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(texts) == 1
