"""Slices of microbatches in the simulation: kills at every class of moment, random histories, and planted bugs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.core import ownership
from engine.core.program.teams import Team
from engine.core.protocol.state import Phase
from tests.simulation.case import Case, Fault
from tests.simulation.planting import all_well, caught, kills
from tests.simulation.schedules import (
    changing_case,
    inside_case,
    joining_case,
    moving_case,
    parting_case,
    random_case,
    single_kills,
    waiting_case,
)

pytestmark = pytest.mark.usefixtures("fresh_answers")

PLAIN = Case(3, 4, slices=2, steps=2)
CASES = (
    PLAIN,
    Case(3, 6, slices=3, redundancy="eager", log_every=3, steps=2),
    Case(4, 4, slices=2, schedule="zb1p", log_every=2, steps=2),
    Case(2, 4, 2, "reroute", schedule="gpipe", slices=2, steps=2),
    Case(4, 4, 2, stages_per_worker=2, schedule="interleaved", slices=2, ties=((0, 3),), steps=2),
    Case(4, 6, stages_per_worker=2, schedule="v-half", slices=2, level=2, steps=2),
)
HISTORIES = (80, 140)
FAMILIES = (random_case, parting_case, inside_case, changing_case, moving_case, joining_case, waiting_case)


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", CASES, ids=Case.text)
def test_a_death_at_a_moment_of_the_first_step(case: Case, stride: int) -> None:
    histories = all_well(single_kills(case, stride))
    assert {history.phase for history in histories} == {Phase.FINISHED}
    assert len(histories) * stride > 20 * case.num_workers
    assert all(len(history.struck) == 1 for history in histories)


def random_histories(first: int, last: int) -> Iterator[Case]:
    """Yields the random cases of numbers, with slices: deaths, hand-overs, other schedules, moves, joins, spares."""
    for number in range(first, last):
        made, slices = FAMILIES[number % len(FAMILIES)](number), 2 + number // len(FAMILIES) % 2
        microbatches = slices * min(made.microbatches, 3)
        yield replace(made, slices=slices, microbatches=microbatches, log_every=slices * made.log_every, fsdp=0)


@pytest.mark.parametrize(("first", "last"), [HISTORIES, pytest.param(0, 4000, marks=pytest.mark.soak)])
def test_slices_among_all_that_can_happen_to_a_job(first: int, last: int) -> None:
    histories = all_well(random_histories(first, last))
    turns = set().union(*(each.turns for each in histories))
    assert {"forward is redone", "backward is redone", "another schedule is in use"} <= turns
    assert {"slot moves to its wanted owner", "waiting worker becomes a member"} <= turns
    assert any(each.case.blocks > 1 and each.struck for each in histories)


def test_a_plan_that_takes_the_slices_in_one_order_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual of backward 0 would then be that of slice 0."""
    monkeypatch.setattr(ownership, "turned", lambda microbatch, slices: microbatch)
    caught(kills(PLAIN), "the plan computes|has no residual")


def test_an_heir_with_the_list_of_whole_microbatches_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Team.line_of
    monkeypatch.setattr(
        Team, "line_of", lambda team, name, worker, number, slices: right(team, name, worker, number, 1)
    )
    killed = (Fault(1, "moment", 4),)
    caught([Case(3, 2, schedule="zb1p", slices=2, log_every=2, steps=2, faults=killed)], "deadlock: worker 2: 2I0")
