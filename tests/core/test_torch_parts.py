"""The table of torch's optimizers and schedules: it is torch's, and its arguments are checked by their form."""

from __future__ import annotations

import inspect
import math
import random
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from engine.core.job.hugging_face import IMPORTS, MODEL
from engine.core.job.job import Job
from engine.core.job.torch_parts import (
    LR_SCHEDULES,
    OPTIMIZERS,
    SCHEDULES,
    LossScale,
    LossScaling,
    TorchPart,
    argument_problems,
    given_arguments,
    inverse_of,
    learning_rate,
    loss_scaling,
    plain_argument,
    scaling_problems,
)
from engine.core.job.update_rules import MONITOR, depends_on_steps, preloads, update_problems
from tests.looped import looped

OF_BAMBOO = {"params", "lr", "foreach", "fused", "capturable", "differentiable", "adjust_lr_fn"}
OF_SCHEDULES = {"optimizer", "last_epoch", "max_lr", "epochs", "steps_per_epoch", "scale_fn", "cycle_momentum"}
OF_SCHEDULES |= {"base_momentum", "max_momentum"}


@looped("part", OPTIMIZERS.values())
def test_the_arguments_of_an_optimizer_are_torchs(part: TorchPart) -> None:
    theirs = inspect.signature(getattr(torch.optim, part.cls)).parameters
    assert set(part.arguments) == set(theirs) - OF_BAMBOO - ({"eps"} if part.cls == "Adafactor" else set())
    for name, argument in part.arguments.items():
        default: Any = given_arguments(part.arguments, {name: argument.default or 0})[name]
        assert default == theirs[name].default or default == (theirs[name].default or 0), name


@looped("part", SCHEDULES.values())
def test_the_arguments_of_a_schedule_are_torchs(part: TorchPart) -> None:
    theirs = inspect.signature(getattr(lr_scheduler, part.cls)).parameters
    ours = set(part.arguments) | ({part.horizon} if part.horizon else set())
    if MONITOR in ours:  # the figure tells the mode
        ours = ours - {MONITOR} | {"mode"}
    assert ours == set(theirs) - OF_SCHEDULES
    for name, argument in part.arguments.items():
        if name == MONITOR:
            continue
        if name != part.horizon and argument.default is None:
            assert theirs[name].default is inspect.Parameter.empty
        elif name != part.horizon:
            assert argument.default == (theirs[name].default or 0), name


def told(**fields: Any) -> list[str]:
    return [str(each) for each in update_problems(Job(**fields))]


@looped(
    ("fields", "words"),
    [
        ({"optimizer": "LBFGS"}, "it calls the model again inside of a step"),
        ({"optimizer": "sparse_adam"}, "it takes sparse gradients only"),
        ({"optimizer": "Adma"}, "did you mean 'adamax'?"),
        ({"optimizer": "adam", "optimizer_args": {"betas": 0.9}}, "expected 2 numbers with commas, found 0.9"),
        ({"optimizer": "adam", "optimizer_args": {"beta1": 0.9}}, "expected one of amsgrad, betas, "),
        ({"optimizer": "adam", "optimizer_args": {"amsgrad": 1}}, "expected true or false, found 1"),
        ({"optimizer": "adafactor", "fsdp": 1}, "expected an optimizer that steps shards, with fsdp"),
        ({"lr_schedule": "ReduceLROnPlateau"}, "did you mean 'plateau'?"),
        ({"lr_schedule": "LambdaLR"}, "it takes a function: give package.module:function"),
        ({"lr_schedule": "OneCycleLR"}, "did you mean 'onecycle'?"),
        ({"lr_schedule": "step"}, "lr_args.step_size: expected a whole number, since it has no default"),
        ({"lr_schedule": "multistep", "lr_args": {"milestones": "3,a"}}, "expected whole numbers with commas"),
        ({"lr_schedule": "cosine", "lr_args": {"gamma": 1}}, "lr_args.gamma: expected no arguments"),
        ({"param_groups": "bias"}, "'bias' has no pattern before a colon"),
        ({"optimizer": "adam", "param_groups": "bias: momentum=1"}, "param_groups.momentum: expected one of"),
    ],
)
def test_a_mistake_is_told_with_its_reason(fields: dict[str, Any], words: str) -> None:
    (problem,) = told(**fields)
    assert words in problem


def test_what_is_right_passes() -> None:
    assert told(optimizer="mine:Lion", optimizer_args={"x": 1}, lr_schedule="mine:rate", lr_args={"y": 2}) == []
    assert told(optimizer="adam", optimizer_args={"betas": "0.8, 0.9"}, param_groups="bias: eps=1e-6") == []
    assert told(lr_schedule="multistep", lr_args={"milestones": 3}) == []


def test_lists_become_tuples() -> None:
    arguments = SCHEDULES["multistep"].arguments
    assert given_arguments(arguments, {"milestones": "3, 7", "gamma": 0.5}) == {"milestones": (3, 7), "gamma": 0.5}
    assert given_arguments(arguments, {"milestones": 3}) == {"milestones": (3,)}
    assert [plain_argument(each) for each in ("0.9,0.99", "a,b", "x", 3)] == [(0.9, 0.99), "a,b", "x", 3]
    assert argument_problems("lr_args", arguments, {"milestones": "3,7"}) == []


def test_only_a_class_imports_the_compiler() -> None:
    assert [preloads(Job(optimizer=each)) for each in ("adamw", "sgd")] == [(), ()]
    assert preloads(Job(optimizer="adam")) == preloads(Job(optimizer="mine:Lion")) == ("torch._dynamo",)
    assert preloads(Job(model=MODEL)) == IMPORTS


def test_the_steps_of_a_job_decide_only_some_rates() -> None:
    depends = {name for name in ("constant", "linear", "cosine", *SCHEDULES) if depends_on_steps(Job(lr_schedule=name))}
    assert depends == {"linear", "cosine", "cosine_annealing", "onecycle", "polynomial"}


# Learning rates, step by step.


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


# The scale of the loss: torch's own rule, step by step.


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


@looped(
    ("fields", "told"),
    [
        ({"scaler_args": {"init_scale": 2}}, "scaler_args.init_scale: expected dtype float16 with it, found float32"),
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
