"""The least useful notice: the worst moment is the begin of a step, and replicas that are there need no copy."""

from __future__ import annotations

from engine.core.elastic.assignment import assign
from engine.core.elastic.least_notice import LeastNotice, copied_to_next_owners, least_notice
from engine.core.elastic.measured import MeasuredFacts
from engine.core.ownership import Grid, Ownership

OWNERSHIP = Ownership(Grid(12, 8), tuple(place // 4 for place in range(12)))


def test_slots_without_replicas_are_copied_to_both_neighbours() -> None:
    owners = assign(OWNERSHIP, [0, 2]).owners
    measured = MeasuredFacts(replica_bytes=(10,) * 12)
    assert copied_to_next_owners(OWNERSHIP, 1, owners, {}, measured) == 40
    whole = {0: [(0, 4), (0, 5), (0, 6)], 2: [(0, 7)]}  # the slot 6 goes to worker 2, which does not hold it
    assert copied_to_next_owners(OWNERSHIP, 1, owners, whole, measured) == 10


def test_the_notice_covers_the_open_step_the_copy_and_the_hand_over() -> None:
    assert least_notice(0, 1e9, step_s=2.0, pause_s=0.5) == LeastNotice(2.5, 2.5, 0)
    assert least_notice(10**9, 1e9, step_s=2.0, pause_s=0.5) == LeastNotice(2.5, 4.5, 10**9)  # copied beside a step
    assert least_notice(10**10, 1e9, step_s=2.0) == LeastNotice(2.0, 12.0, 10**10)
