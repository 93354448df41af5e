"""A worker's own part of a step: what one pass over the whole step gives it, without the lists of the other workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.action import Action
from engine.core.ownership import Grid, Ownership, Redundancy, fresh, with_shadows
from engine.core.program import owners
from engine.core.program.build import build_program, build_validation
from engine.core.program.dependencies import peers_of
from engine.core.program.owners import OwnersProgram, owners_compute
from engine.core.program.passes import with_transfers
from engine.core.program.schedule_csv import rows_to_csv
from engine.core.program.schedules import SCHEDULES


def parts(schedule: str, ownership: Ownership) -> OwnersProgram:
    """Returns the step of the owners, of which nothing is made yet."""
    return OwnersProgram(owners_compute(schedule, ownership.grid, ownership.owners), ownership)


@st.composite
def ownerships(draw: st.DrawFn, schedule: str) -> Ownership:
    """Draws an ownership of a job of a schedule: as at the start, or after a death."""
    known = SCHEDULES[schedule]
    workers, pipelines = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    per_worker = draw(st.integers(known.stages_per_worker[0], min(known.stages_per_worker[1], 3)))
    microbatches = max(draw(st.integers(1, 12)), known.least_microbatches(workers))
    grid = Grid(workers * per_worker, microbatches, pipelines)
    ownership = fresh(grid, per_worker, known.placement)
    if len(ownership.workers()) > 1 and draw(st.booleans()):
        dead, heir = draw(st.permutations(ownership.workers()))[:2]
        ownership = replace(ownership, owners=tuple(heir if each == dead else each for each in ownership.owners))
    return ownership


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=15)
@given(data=st.data())
def test_parts_are_those_of_the_whole_program(schedule: str, data: st.DataObject) -> None:
    bare = data.draw(ownerships(schedule))
    redundancy: Redundancy = data.draw(st.sampled_from(["none", "lazy", "eager"]))
    ownership = with_shadows(bare, redundancy, 1, bare.workers())
    log_every = data.draw(st.sampled_from([0, 2])) if redundancy != "none" else 0
    how = (schedule, ownership, redundancy, (), log_every)
    whole, validation = build_program(*how), build_validation(ownership)
    for worker in ownership.workers():
        owners.owners_program.cache_clear()
        only = peers_of(worker, ownership)
        assert build_program(*how, only=only) == {each: whole[each] for each in only}
        assert build_validation(ownership, only) == {each: validation[each] for each in only}


def test_parts_of_a_schedule_of_ones_own() -> None:
    ownership = fresh(Grid(8, 6), 2, "v")
    text = rows_to_csv(SCHEDULES["zbv"](4, 6, 2))
    assert {worker: parts(text, ownership)[worker] for worker in range(4)} == parts("zbv", ownership).whole()


def test_a_worker_of_many_makes_the_lists_of_its_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    known = SCHEDULES["interleaved"]

    def generate(worker: int, *shape: int) -> tuple[Action, ...]:
        made.append(worker)
        return known.generate(worker, *shape)

    monkeypatch.setitem(SCHEDULES, "interleaved", replace(known, generate=generate))
    owners.owners_compute.cache_clear()
    ownership = with_shadows(fresh(Grid(512, 8), 2), "lazy", 1, range(256))
    owners.owners_program.cache_clear()
    build_program("interleaved", ownership, "lazy", only=peers_of(100, ownership))
    owners.owners_compute.cache_clear()
    owners.owners_program.cache_clear()
    assert 97 <= min(made) and max(made) <= 103


def test_a_missing_neighbour_shows() -> None:
    ownership = fresh(Grid(4, 4))
    compute, whole = owners_compute("1f1b", ownership.grid, ownership.owners), parts("1f1b", ownership).whole()
    assert with_transfers({each: compute.line_of(each) for each in (0, 1, 2)}, ownership)[1] == whole[1]
    for missing in (0, 2):
        beside = {each: compute.line_of(each) for each in (0, 1, 2) if each != missing}
        assert with_transfers(beside, ownership)[1] != whole[1]


def test_a_worker_without_slots_has_no_part() -> None:
    ownership = fresh(Grid(2, 2))
    assert 7 not in parts("1f1b", ownership)
    assert build_program("1f1b", ownership, only=(1, 7)) == {1: build_program("1f1b", ownership)[1]}
    assert parts("1f1b", ownership) == parts("1f1b", ownership).whole()
