"""The way out of a worker that has given notice: what its grace, the usual step and the open step make of it."""

from __future__ import annotations

from engine.core.protocol.rebalancing import (
    HAND_OVER_NS,
    LeaveStrategy,
    departs,
    has_heirs,
    nobody_takes_over,
    until_boundary_ns,
    way_out,
)
from tests.core.membership_cases import S, running
from tests.looped import looped

USUAL = (2 * S, 2 * S, 9 * S)
BOUNDARY, INSIDE, NONE = LeaveStrategy


@looped(
    ("left_s", "spent_s", "way"),
    [
        (120, 0.1, BOUNDARY),
        (2.3, 0, BOUNDARY),
        (2.2, 0, INSIDE),
        (1, 0.5, INSIDE),
        (1, 1.5, BOUNDARY),
        (0.1, 0, INSIDE),
        (0.09, 0, NONE),
        (0.25, 1.99, INSIDE),
        (0.75, 2.5, INSIDE),
        (0.81, 2.5, BOUNDARY),
    ],
)
def test_the_way_follows_from_the_grace_the_usual_step_and_the_open_one(
    left_s: float, spent_s: float, way: LeaveStrategy
) -> None:
    assert way_out(round(left_s * S), round(spent_s * S), USUAL, has_heirs=True) is way


def test_more_time_is_never_a_worse_way() -> None:
    ways = list(LeaveStrategy)
    for spent in range(0, 5 * S, S // 7):
        found = [ways.index(way_out(left, spent, USUAL, has_heirs=True)) for left in range(0, 4 * S, S // 50)]
        assert found == sorted(found, reverse=True)


def test_without_heirs_a_step_is_not_left() -> None:
    assert way_out(S, 0, USUAL, has_heirs=False) is NONE
    assert way_out(120 * S, 0, USUAL, has_heirs=False) is BOUNDARY


def test_without_a_usual_step_the_boundary_counts_as_near() -> None:
    assert until_boundary_ns(0, ()) == 0
    assert way_out(HAND_OVER_NS, 0, (), has_heirs=True) is BOUNDARY


def test_who_has_handed_over_leaves_before_its_end() -> None:
    assert not departs(S, 120 * S)
    assert departs(S // 2, 120 * S)
    assert not departs(S // 2, S // 2), "it needs time to send"
    assert departs(S // 4, S // 2)


def test_heirs_are_staying_workers_with_whole_replicas() -> None:
    state = running()
    assert has_heirs(state, 2)
    assert not has_heirs(state._replace(leaving=(1, 2)), 2)
    assert not has_heirs(running(redundant=False), 2)


def test_nobody_takes_over_when_all_members_have_a_notice_and_none_waits() -> None:
    state = running()
    assert not nobody_takes_over(state)
    assert not nobody_takes_over(state._replace(leaving=state.members[1:]))
    all_leave = state._replace(leaving=state.members)
    assert nobody_takes_over(all_leave)
    assert not nobody_takes_over(all_leave._replace(waiting=(7,)))
    assert nobody_takes_over(all_leave._replace(waiting=(7,), cramped={7: ""}))
