"""What is worked out beside training waits until training hardly needs the interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.runtime.worker.training import well_inside


@pytest.mark.parametrize(
    ("seen", "is_good"),
    [
        ([(3, 7, True)], False),  # it may just have begun
        ([(3, 7, True), (3, 7, True)], True),
        ([(3, 7, True), (3, 8, True)], False),  # the next one
        ([(3, 7, False), (3, 7, False)], False),  # one that waits for others
        ([(2, 7, True), (2, 7, True)], False),  # of the step before
        ([(4, 1, True), (4, 1, True)], True),
        ([(3, each, True) for each in range(4)], False),
        ([(3, each, True) for each in range(5)], True),  # all of them are short
        ([(3, each, False) for each in range(5)], False),
    ],
)
def test_the_moment_is_good_inside_an_action_that_has_been_seen_before(
    seen: list[tuple[int, int, bool]], is_good: bool
) -> None:
    control: Any = SimpleNamespace(at=None)
    look = well_inside(control, 3)
    for control.at in seen:
        found = look()
    assert found is is_good
