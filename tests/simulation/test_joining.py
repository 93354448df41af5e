"""Joins without a failure in the simulation: with deaths and stops while the next group is formed, and planted bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.core.messages import EpochMessage, NextGroupMessage
from engine.core.protocol import coordinator as hearing
from engine.core.protocol import orders
from engine.core.protocol import worker_machine as machine
from engine.core.protocol.coordinator_state import NextGroup, attempted
from engine.core.protocol.state import Phase, State
from engine.core.protocol.worker_inputs import GroupKey
from engine.core.protocol.worker_machine import Stepped
from engine.core.protocol.worker_state import EnterNextGroup, WorkerState
from tests.simulation.case import MOVE, Case, Fault
from tests.simulation.links import MS
from tests.simulation.planting import SMALL, all_well, caught, ended
from tests.simulation.run import run
from tests.simulation.schedules import joining_case, take_overs
from tests.simulation.world import World
from tests.soaked import soaked

HISTORIES = 50
ENTERED = "next group is entered"
JOINING = replace(SMALL, steps=5, waiting=1, joining=1)
WANTED = next(  # stages are to move to the joiner
    Fault(1, "moment", 12, MOVE, number) for number in range(1, 100) if 3 in World(JOINING).wanted(number)
)


def test_a_worker_joins_without_a_failure_and_no_work_is_done_again() -> None:
    world = ended(JOINING)
    state = world.membership
    assert (state.phase, state.epoch, state.members) == (Phase.FINISHED, 2, (0, 1, 2, 3))
    assert (state.planned, state.reason) == (True, "worker 3 has joined")
    assert not world.turns & {"forward is redone", "backward is redone", "transfer fails", "worker catches up"}


def test_a_joiner_that_is_wanted_is_healed_and_owns_two_boundaries_later() -> None:
    world = ended(replace(JOINING, faults=(WANTED,)))
    assert world.membership.owners == world.wished
    assert 3 in world.membership.owners
    assert world.membership.epoch == 3, "one epoch to join, one to move"


def test_a_joiner_that_hangs_holds_nobody_up() -> None:
    """It is lost at last, and the steps are committed meanwhile; no epoch begins."""
    hung = replace(JOINING, faults=(Fault(3, "form next", 1, "pause", 300_000_000),))
    world = ended(hung)
    assert (world.membership.epoch, world.membership.waiting) == (1, (3,))
    assert world.membership.committed_ns < ended(replace(SMALL, steps=5)).membership.committed_ns + MS


def test_as_many_workers_as_a_pipeline_has_take_a_share_of_both_pipelines() -> None:
    world = ended(Case(stages=4, blocks=2, pipelines=2, microbatches=4, steps=12, elastic=True, waiting=4, joining=4))
    owners = world.membership.owners
    assert {*owners} == {*range(8)}, "one block of eight for each"
    assert all({*owners[first : first + 4]} & {4, 5, 6, 7} for first in (0, 4)), owners


def test_workers_beyond_the_most_wait_until_one_of_the_others_is_lost() -> None:
    limited = replace(JOINING, waiting=3, joining=3, most_workers=4, steps=8)
    world = ended(limited)
    assert (len(world.membership.members), len(world.membership.waiting)) == (4, 2)
    world = ended(replace(limited, faults=(Fault(0, "COMMIT", 5),)))
    assert 0 not in world.membership.members
    assert (len(world.membership.members), len(world.membership.waiting)) == (4, 1)


@pytest.mark.parametrize("stride", [7, soaked(1)])
def test_every_death_around_a_join(stride: int) -> None:
    moments = run(JOINING).moments
    kills = [
        replace(JOINING, seed=moment % 4, faults=(WANTED, Fault(worker, "moment", moment)))
        for worker, count in enumerate(moments)
        for moment in range(3 + worker, count + 1, stride)
    ]
    assert {history.phase for history in all_well(kills)} == {Phase.FINISHED}


@pytest.mark.parametrize("point", ["form next", "formed next", "enter next", "HEAL"])
@pytest.mark.parametrize("kind", ["kill", "pause", "notice", "network"])
def test_a_fault_of_each_worker_at_each_moment_of_a_join(point: str, kind: str) -> None:
    length = {"kill": 0, "pause": 20_000_000, "notice": 60_000_000, "network": 3_000_000}[kind]
    all_well(
        replace(JOINING, seed=seed, spread=seed, faults=(WANTED, Fault(worker, point, 1, kind, length)))
        for worker in range(4)
        for seed in (0, 3)
    )


def test_a_coordinator_that_dies_while_a_worker_joins_is_replaced() -> None:
    histories = all_well(take_overs(replace(JOINING, faults=(WANTED,)), 2))
    assert {history.phase for history in histories} == {Phase.FINISHED}


def test_random_histories() -> None:
    histories = all_well(joining_case(number) for number in range(HISTORIES))
    turns = Counter(turn for history in histories for turn in history.turns)
    assert turns[ENTERED] > HISTORIES * 0.3, turns
    assert turns["next group is given up"] > HISTORIES * 0.3, turns


@pytest.mark.soak
def test_many_random_histories() -> None:
    all_well(joining_case(number) for number in range(HISTORIES, 25_000))


# Planted bugs


def around_a_join() -> Iterator[Case]:
    for number in range(400):
        yield joining_case(number)


def test_a_group_is_entered_before_all_have_formed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready_joiners(group: NextGroup, state: State) -> tuple[int, ...]:
        return state.joiners if group.formed and group.epoch == state.epoch + 1 else ()

    monkeypatch.setattr(orders, "ready_joiners", ready_joiners)
    monkeypatch.setattr(hearing, "ready_joiners", ready_joiners)
    caught(around_a_join(), r"enters group \d, and worker \d has")


def test_a_group_of_another_attempt_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker takes whichever group it has; before it was given up, some had formed an earlier one."""

    def changes_group(state: WorkerState, epoch: EpochMessage) -> Stepped:
        if not epoch.group or not state.next_groups:
            return state, ()
        first = next(iter(state.next_groups), GroupKey(0, 0))
        return state._replace(next_groups={}, forming=0), (EnterNextGroup(first),)

    monkeypatch.setattr(machine, "changes_group", changes_group)
    caught(around_a_join(), "still has the groups")


def test_a_member_that_died_has_formed_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt for the epoch that the verdict makes is entered by a later one."""

    def ready_joiners(group: NextGroup, state: State) -> tuple[int, ...]:
        return state.joiners if group.is_formed else ()

    def once(group: NextGroup, state: State) -> tuple[NextGroup, NextGroupMessage | None]:
        return (group, None) if group.members else attempted(group, state)

    monkeypatch.setattr(hearing, "ready_joiners", ready_joiners)
    monkeypatch.setattr(orders, "ready_joiners", ready_joiners)
    monkeypatch.setattr(orders, "attempted", once)
    caught(around_a_join(), r"enters group \d, and worker \d has")
