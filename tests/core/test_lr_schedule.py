"""Learning rates, step by step."""

from __future__ import annotations

import math

import pytest

from engine.core.job.torch_parts import LR_SCHEDULES, learning_rate


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_warm_up_then_decay(name: str, rates: list[float]) -> None:
    found = [learning_rate(name, 2.0, step, num_steps=6, warmup_steps=2) for step in range(6)]
    assert found == pytest.approx([2.0 * rate for rate in rates])


@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_peak_is_reached_at_the_end_of_the_warm_up_and_never_passed(name: str) -> None:
    for num_steps, warmup_steps in [(1, 0), (1, 1), (40, 5), (10, 10), (100, 1)]:
        found = [learning_rate(name, 3e-3, step, num_steps, warmup_steps) for step in range(num_steps)]
        assert max(found) == 3e-3
        assert min(found) > 0
        assert found[warmup_steps:] == sorted(found[warmup_steps:], reverse=True)


def test_a_warm_up_longer_than_the_run_never_ends() -> None:
    found = [learning_rate("cosine", 1.0, step, num_steps=4, warmup_steps=8) for step in range(4)]
    assert found == [0.125, 0.25, 0.375, 0.5]
