"""The scale of the loss: torch's own rule, step by step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.core.job.job import Job
from engine.core.job.torch_parts import LossScale, LossScaling, inverse_of, loss_scaling, scaling_problems


@pytest.mark.parametrize(
    "args",
    [
        {"growth_interval": 3},
        {"init_scale": 3e5, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2},
        {"init_scale": 1e38, "growth_interval": 1},
    ],
)
def test_every_step_has_the_scale_of_torch(args: dict[str, Any]) -> None:
    rule, draws = LossScaling(**args), random.Random(1)  # noqa: S311
    scaler = torch.amp.GradScaler("cpu", **args)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    now = rule.first()
    for _ in range(60):
        is_skipped = draws.random() < 0.3
        assert scaler.scale(torch.tensor(1.0)).item() == now.scale == scaler.get_scale()
        assert scaler._get_growth_tracker() == now.good_steps
        parameter.grad = torch.full((1,), torch.inf if is_skipped else now.scale)
        scaler.unscale_(optimizer)
        if not is_skipped:
            assert parameter.grad.item() == (torch.tensor(now.scale) * inverse_of(now.scale)).item()
        scaler.step(optimizer)
        scaler.update()
        now = rule.after(now, is_skipped=is_skipped)


def test_only_float16_is_scaled() -> None:
    assert loss_scaling(Job()) is None
    assert loss_scaling(Job(dtype="bfloat16")) is None
    assert loss_scaling(Job(dtype="float16", scaler_args={"growth_interval": 5})) == LossScaling(growth_interval=5)
    assert LossScaling().first() == LossScale(65536.0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"scaler_args": {"init_scale": 2}}, "scaler_args.init_scale: expected dtype float16 beside it, found float32"),
        (
            {"dtype": "float16", "scaler_args": {"interval": 2}},
            "scaler_args.interval: expected one of backoff_factor, ",
        ),
        ({"dtype": "float16", "scaler_args": {"growth_factor": 1}}, "scaler_args.growth_factor: expected a number > 1"),
        ({"dtype": "float16", "scaler_args": {"backoff_factor": 1.0}}, "expected a number > 0 and < 1, found 1.0"),
        ({"dtype": "float16", "scaler_args": {"growth_interval": 0}}, "expected a whole number >= 1, found 0"),
        ({"dtype": "float16", "scaler_args": {"init_scale": 0.0}}, "expected a number >= 2 ** -24, found 0.0"),
    ],
)
def test_a_wrong_argument_is_told(fields: dict[str, Any], told: str) -> None:
    (problem,) = scaling_problems(Job(**fields))
    assert told in str(problem)
