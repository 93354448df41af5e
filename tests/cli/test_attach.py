"""Faults for a job that is running: which of them can no longer strike, and when nobody waits for more."""

from __future__ import annotations

from typing import Any

from bamboo_cli.attach import have_shown, pace, skipped
from engine.core.action import parse_action
from engine.core.fault import After, At, Fault, When, Worker


def at(name: str, step: int, when: When = "before") -> Fault:
    return Fault(name, At(step, parse_action("1B0"), when), (Worker(1),))


def after(name: str, fault: str) -> Fault:
    return Fault(name, After(fault, "plan"), (Worker(2),))


def test_all_that_came_too_late_are_named_and_all_that_wait_for_them() -> None:
    faults = [after("d", "c"), after("c", "a"), at("a", 1, "during"), at("b", 9), after("e", "b"), at("f", 1)]
    assert [each.id for each in skipped(faults, {"a", "f"})] == ["d", "c", "a", "f"]
    assert skipped(faults, set()) == []


def event(kind: str, at_ns: int, fault: str = "") -> dict[str, Any]:
    return {"event": kind, "at_ns": at_ns} | ({"fault": fault} if fault else {})


SHOWN = [event("fault", 1, "a"), event("confirmed", 2, "a"), event("commit", 3), event("commit", 4)]


def test_nobody_waits_for_one_that_was_not_there_when_the_other_was_recovered_from() -> None:
    assert have_shown([at("a", 1)], SHOWN)
    assert not have_shown([at("a", 1)], SHOWN[:3])
    assert not have_shown([at("a", 1)], SHOWN[2:])
    assert not have_shown([at("a", 1), at("b", 2)], SHOWN)
    both = [at("a", 1), after("c", "a")]
    assert have_shown(both, SHOWN)
    assert not have_shown(both, [*SHOWN, event("fault", 5, "c")])
    late = Fault("d", After("a", None, delay_ns=2), (Worker(2),))
    assert not have_shown([at("a", 1), late], SHOWN)
    assert have_shown([at("a", 1), late], [*SHOWN, event("commit", 5), event("commit", 6)])


def test_the_pace_is_that_of_the_last_steps() -> None:
    slow_start = [0, 5 * 10**9]
    assert pace([*slow_start, *(6 * 10**9 + step * 10**8 for step in range(4))]) == 10
    assert pace(slow_start) == 0
    assert pace([7]) == pace([]) == 0
    assert pace([7, 7]) == 10**9  # of steps that take no time it says something, too
