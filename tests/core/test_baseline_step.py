"""What a step usually takes, and what is left of it: from made-up commits and actions."""

from __future__ import annotations

import pytest

from engine.core.action import parse_action
from engine.core.checks.baseline_step import FinishedAction, baseline_ns, remaining_ns

COMMITS = [(4, 1000), (5, 1100), (6, 1200), (7, 1330)]


def did(step: int, worker: int, action: str, end_ns: int) -> FinishedAction:
    return step, worker, parse_action(action), end_ns


ENTRIES = [
    did(4, 0, "0F1", 999),  # of the first commit it is not known how long its step took
    did(5, 0, "0F1", 1020),
    did(6, 0, "0F1", 1130),
    did(7, 0, "0F1", 1230),
    did(7, 1, "0F1", 1329),  # what another worker does is another action
    did(7, 0, "0STEP", 1331),
    did(5, 0, "0STEP", 1101),
]


@pytest.mark.parametrize(("commits", "expected"), [(COMMITS, 100), (COMMITS[:2], 100), (COMMITS[:1], None), ([], None)])
def test_the_median_between_commits(commits: list[tuple[int, int]], expected: int | None) -> None:
    assert baseline_ns(commits) == expected


def test_what_is_left_after_an_action_is_what_was_left_in_other_steps() -> None:
    open_step = [*ENTRIES, did(8, 0, "0F1", 1350), did(8, 0, "0F2", 1377)]
    assert remaining_ns(COMMITS, open_step, 1360) == 80 - 10  # the median of 80, 70 and 100, 10 later


def test_the_last_action_may_be_of_the_step_before() -> None:
    assert remaining_ns(COMMITS, ENTRIES, 1340) == 99 - 9


def test_what_was_never_done_before_tells_nothing() -> None:
    assert remaining_ns(COMMITS, [*ENTRIES, did(8, 0, "0f1", 1350)], 1360) is None
    assert remaining_ns(COMMITS, [], 1360) is None
    assert remaining_ns([], ENTRIES, 1360) is None
    assert remaining_ns(COMMITS[-1:], ENTRIES, 1340) is None
