"""Waiting workers in the simulation: with deaths of waiting and of half-healed ones, take-overs, and planted bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.exclusion import Exclusion
from engine.core.protocol import transitions
from engine.core.protocol import transitions as requests
from engine.core.protocol.state import Phase, State
from engine.core.protocol.verdicts import all_inventoried, new_epoch
from tests.simulation import actions
from tests.simulation.case import Case, Fault
from tests.simulation.compiled import HEAL
from tests.simulation.executor import Executor
from tests.simulation.planting import SMALL, all_well, caught, ended
from tests.simulation.replica import first_replica
from tests.simulation.run import run
from tests.simulation.schedules import single_kills, take_overs, waiting_case

HISTORIES = 150
TAKEN_IN = "waiting worker becomes a member"
WAITING = replace(SMALL, steps=4, waiting=1)
KILLED = replace(WAITING, faults=(Fault(1, "moment", 30),))


def test_a_worker_that_waits_becomes_a_member_with_the_verdict() -> None:
    state = ended(KILLED).membership
    assert (state.phase, state.members, state.waiting, state.lost) == (Phase.FINISHED, (0, 2, 3), (), {})
    assert any(3 in line for line in state.shadows)


def test_a_worker_that_waits_in_vain_ends_with_the_run() -> None:
    world = ended(WAITING)
    assert (world.membership.epoch, world.membership.waiting, world.workers[3].alive) == (1, (3,), False)


@pytest.mark.parametrize(("kind", "length"), [("kill", 0), ("zombie", 60_000), ("notice", 0)])
def test_the_loss_of_a_worker_that_waits_is_no_epoch(kind: str, length: int) -> None:
    state = ended(replace(WAITING, faults=(Fault(3, "waiting", 1, kind, length),))).membership
    assert (state.phase, state.epoch, state.members, list(state.lost)) == (Phase.FINISHED, 1, (0, 1, 2), [3])


def test_a_job_that_is_stopped_lets_a_worker_that_waits_go_before_the_open_step_ends() -> None:
    world = ended(replace(WAITING, faults=(Fault(0, "moment", 30, "stop"),)))
    state = world.membership
    assert (state.phase, state.epoch, state.waiting, world.workers[3].alive) == (Phase.FINISHED, 1, (), False)
    assert [each.why for each in state.lost.values()] == ["was released, because the run ended"]


def test_every_kill_with_a_worker_that_waits() -> None:
    for case in (WAITING, replace(WAITING, redundancy="eager", microbatches=3)):
        assert {history.phase for history in all_well(single_kills(case, 5))} == {Phase.FINISHED}


def deaths_of_members(stride: int) -> Iterator[Case]:
    """Yields cases in which a worker that was taken in dies at each of its moments, also when it is half healed."""
    for moment in range(2, run(KILLED).moments[3] + 1, stride):
        yield replace(KILLED, seed=moment % 4, faults=(*KILLED.faults, Fault(3, "moment", moment)))


def test_every_death_of_a_worker_that_was_taken_in() -> None:
    assert {history.phase for history in all_well(deaths_of_members(3))} == {Phase.FINISHED}


def test_a_coordinator_that_dies_is_replaced() -> None:
    histories = all_well(take_overs(KILLED, 3))
    assert sum(TAKEN_IN in history.turns for history in histories) > len(histories) * 0.9


def test_random_histories() -> None:
    histories = all_well(waiting_case(number) for number in range(HISTORIES))
    turns = Counter(turn for history in histories for turn in history.turns)
    assert turns[TAKEN_IN] > HISTORIES * 0.5, turns


@pytest.mark.soak
def test_many_random_histories() -> None:
    all_well(waiting_case(number) for number in range(HISTORIES, 25_000))


# Planted bugs


def test_death_of_a_waiting_worker_makes_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    def loses(state: State, gone: Iterable[Exclusion]) -> State:
        return new_epoch(state, state.moved_ns, gone)

    monkeypatch.setattr(transitions, "loses", loses)
    caught((replace(WAITING, faults=(Fault(3, "waiting"),)),), "worker 3 is no member, and its loss makes an epoch")


def test_a_number_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that takes over hears again of a waiting worker that has died, and another in a late word."""
    monkeypatch.setattr(requests, "is_unknown", lambda state, worker: True)
    dies = Fault(3, "waiting")
    caught((replace(WAITING, seed=1, faults=(dies,)),), "number 3 is used twice")
    caught(take_overs(replace(WAITING, faults=(dies, Fault(1, "moment", 40))), 3), "number 3 is used twice")


@pytest.mark.usefixtures("fresh_answers")
def test_a_half_healed_replica_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member is believed to hold all slots, also one that has just been taken in."""

    def believes(state: State) -> State:
        slots = tuple(range(len(state.owners)))
        return all_inventoried(state._replace(copies=dict.fromkeys(state.members, slots)))

    monkeypatch.setattr(transitions, "all_inventoried", believes)
    caught(map(waiting_case, (9, 38, 44)), r"which it does not hold|lost \(\(\) indeed\)")


@pytest.mark.usefixtures("fresh_answers")
def test_a_half_healed_replica_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    def heal(worker: Executor, action: tuple[Any, ...]) -> bool:
        worker.replicas[action[1]] = first_replica(action[1], worker.case.pipelines)
        worker.replicas[action[1]].version = worker.step
        return True

    monkeypatch.setattr(actions, "_DO", (*actions._DO[:HEAL], heal, *actions._DO[HEAL + 1 :]))
    caught((KILLED,), "of slot .* differ")
