"""The soak of spot machines in small: one strike, and the same line after it."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.spot_soak import EVERY, KINDS, Strike, _repeated, live_through, strikes_of


def test_each_kind_of_strike_comes_as_often_as_the_others() -> None:
    assert Counter(strikes_of(1, 20)) == dict.fromkeys(KINDS, 5)
    assert strikes_of(1, 20) == strikes_of(1, 20) != strikes_of(2, 20)


@pytest.mark.parametrize(
    ("committed", "begun", "outcome", "steps", "allowed"),
    [
        (20, 20, "interrupted", 0, 0),  # the last committed step is kept
        (20, 15, "interrupted", 5, 0),
        (20, 15, "", 5, EVERY),
        (16, 7, "", 9, EVERY + 1),  # step 15 was being written
        (20, 7, "", 13, EVERY + 5),
        (30, 7, "", 23, EVERY + 7),
    ],
)
def test_steps_that_are_trained_again_are_counted(
    committed: int, begun: int, outcome: str, steps: int, allowed: int
) -> None:
    assert _repeated("run", committed, begun, outcome)[1:] == (steps, allowed)


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_a_strike_and_the_same_line_give_the_bits_of_the_undisturbed_run(tmp_path: Path) -> None:
    """Other ends after which the line goes on: test_kept_ends.py."""
    assert live_through([Strike("launcher", signal.SIGKILL)], 1, tmp_path) == []
