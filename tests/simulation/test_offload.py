"""Copies of residuals to the host and back in the simulation: kills before and after each of them, and planted bugs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.action import Action, Op, Program
from engine.core.program import build as program
from engine.core.program.offload import line_with_offloads
from engine.core.protocol.state import Phase
from tests.simulation import compiled, plans
from tests.simulation.case import Case, Fault
from tests.simulation.classes import moments_of
from tests.simulation.planting import all_well, caught
from tests.simulation.schedules import changing_case, inside_case, parting_case, random_case

pytestmark = pytest.mark.usefixtures("fresh_answers")

LEAVES, BACK = "residual leaves for the host", "residual comes back"
PLAIN = Case(3, 4, schedule="gpipe", steps=2, copy_time=0.1)
CASES = (
    PLAIN,
    Case(5, 5, redundancy="eager", steps=2, copy_time=0.1),
    Case(4, 5, schedule="zb1p", log_every=2, steps=2, copy_time=0.1),
    Case(2, 4, 2, "reroute", schedule="gpipe", steps=2, copy_time=0.1),
    Case(4, 4, stages_per_worker=2, schedule="v-half", steps=2, copy_time=0.1),
    Case(6, 4, blocks=2, steps=2, copy_time=0.1),
    Case(3, 6, schedule="zb1p", slices=2, redundancy="eager", steps=2, copy_time=0.1),
)
HISTORIES = 48


def kills(case: Case, stride: int = 1) -> Iterator[Case]:
    """Yields one death more, of the worker before or behind a copy: at every `stride`-th of them."""
    moments = moments_of(case)
    copies = sorted(moments["OFFLOAD"] + moments["RELOAD"], key=lambda at: at[1])
    for worker, moment in copies[::stride]:
        yield replace(case, faults=(*case.faults, Fault(worker, "moment", moment)))


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", CASES, ids=Case.text)
def test_a_death_before_and_behind_each_copy(case: Case, stride: int) -> None:
    histories = all_well(kills(case, stride))
    assert {history.phase for history in histories} == {Phase.FINISHED}
    assert all(len(history.struck) == 1 and {LEAVES, BACK} <= history.turns for history in histories)


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.soak)])
def test_a_second_death_while_the_rest_of_a_step_takes_residuals_back(stride: int) -> None:
    for one in kills(replace(PLAIN, level=2), stride):
        all_well(kills(one, stride))


def random_histories(first: int, last: int) -> Iterator[Case]:
    """Yields the random cases of numbers, with copies: deaths, hand-overs in and between steps, other schedules."""
    for number in range(first, last):
        made = (random_case, parting_case, inside_case, changing_case)[number % 4](number)
        made = replace(made, microbatches=max(4, made.microbatches), copy_time=(0.1, 0.5)[number % 2])
        if number % 5 == 4:
            yield replace(made, slices=2, microbatches=6, log_every=2 * made.log_every, fsdp=0)
        else:
            yield replace(made, residuals=("recompute", "ship")[number // 4 % 2])


@pytest.fixture
def _time_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in virtual time is too short for a grace that ends in it and leaves time to send."""
    monkeypatch.setattr("engine.core.protocol.orders.left_ns", lambda workers, *_: dict.fromkeys(workers, 10**9))


@pytest.mark.usefixtures("_time_to_send")
@pytest.mark.parametrize("last", [HISTORIES, pytest.param(4000, marks=pytest.mark.soak)])
def test_copies_among_deaths_notices_and_changes_of_the_schedule(last: int) -> None:
    histories = all_well(random_histories(0, last))
    assert sum(BACK in each.turns for each in histories) > last * 0.4
    assert {"residual is taken", "forward is redone", "another schedule is in use"} <= set().union(
        *(each.turns for each in histories)
    )


def without(op: Op, line: tuple[Action, ...]) -> tuple[Action, ...]:
    first = next((action for action in line if action.op is op), None)
    return tuple(action for action in line if action is not first)


@pytest.mark.parametrize(
    ("op", "words"), [(Op.RELOAD, "uses .*, which is on the host"), (Op.OFFLOAD, "copies .* device")]
)
@pytest.mark.parametrize("of_a_plan", [False, True])
def test_a_forgotten_copy_is_caught(of_a_plan: bool, op: Op, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the program of a step, or in the rest of one after a death."""
    built, placed = program.build_program, line_with_offloads

    def build(*how: Any) -> Program:
        return {worker: without(op, line) for worker, line in built(*how).items()}

    if of_a_plan:
        monkeypatch.setattr(compiled, "line_with_offloads", lambda *how: without(op, placed(*how)))
    else:
        monkeypatch.setattr(plans, "build_program", build)
    caught(kills(PLAIN) if of_a_plan else [PLAIN], words)


def test_a_plan_that_takes_all_residuals_for_here_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = line_with_offloads
    monkeypatch.setattr(
        compiled,
        "line_with_offloads",
        lambda line, copy_time, slices, here, away: placed(line, copy_time, slices, {*here, *away}),
    )
    caught(kills(PLAIN), "which is on the host")
