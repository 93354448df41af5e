"""The learning rate of each step, as a function of the step alone: any worker has the rate of any step.

A schedule of torch is stepped beside a parameter that is not trained, and each rate is kept. So a worker that heals,
resumes or takes a step again gets torch's own bits. Behind the warm-up a schedule counts from 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from engine.core.config.job import FACTORY, Job
from engine.core.config.lr_schedule import learning_rate, warming_up
from engine.core.config.torch_parts import SCHEDULES, given_arguments, plain_argument
from engine.core.errors import Problem, UserError
from engine.models.arguments import check_user_args
from engine.models.user_code import running
from engine.models.user_factory import import_factory

LearningRate = Callable[[int], float]  # of the step, 0-based
_MOST_TRIED = 1000
_NEVER = (
    lr_scheduler.ReduceLROnPlateau,
    lr_scheduler.SequentialLR,
    lr_scheduler.ChainedScheduler,
)


def learning_rates(job: Job) -> LearningRate:
    """Returns the rate of each step; raises UserError for code of the user's that is no schedule."""
    if (part := SCHEDULES.get(job.lr_schedule)) is not None:
        kwargs = given_arguments(part.arguments, job.lr_args)
        if part.horizon:
            kwargs.setdefault(part.horizon, _horizon(job))
        if part.peak:
            kwargs[part.peak] = job.lr
        kind = getattr(lr_scheduler, part.cls)
        if "cycle_momentum" in inspect.signature(kind).parameters:
            kwargs["cycle_momentum"] = False
        return _warmed(job, _Stepped(job, kind, kwargs))
    if FACTORY.fullmatch(job.lr_schedule):
        return _warmed(job, _own(job))
    peak, steps, warmup = job.lr, job.steps, job.warmup_steps
    return lambda step: learning_rate(job.lr_schedule, peak, step, steps, warmup)


def check_rates(job: Job) -> None:
    """Tries the first rates of a user's schedule; raises UserError if one is no rate, or differs the second time."""
    if not FACTORY.fullmatch(job.lr_schedule):
        return
    first, second = (learning_rates(job) for _ in range(2))
    steps = range(job.warmup_steps, min(job.steps, job.warmup_steps + _MOST_TRIED))
    found = {step: first(step) for step in steps}
    for step in reversed(steps):
        if second(step) != found[step]:
            hint = f"step {step} has the rate {found[step]!r}, and {second(step)!r} where steps are asked for backwards"
            raise UserError([Problem("lr_schedule", "a function of the step alone", repr(job.lr_schedule), hint)])


def _horizon(job: Job) -> int:
    return max(1, job.steps - job.warmup_steps)


def _warmed(job: Job, rate_of: LearningRate) -> LearningRate:
    """Returns a schedule behind the warm-up of the job."""

    def rate(step: int) -> float:
        if step < job.warmup_steps:
            return warming_up(job.lr, step, job.warmup_steps)
        return rate_of(step - job.warmup_steps)

    return rate


class _Stepped:
    """The rates of a scheduler, which is stepped as far as it is asked for."""

    def __init__(self, job: Job, kind: Callable[..., lr_scheduler.LRScheduler], kwargs: Mapping[str, Any]):
        self._name = job.lr_schedule
        self._optimizer = _Untrained(job.lr)
        try:
            self._scheduler = kind(self._optimizer, **kwargs)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise UserError(
                [Problem("lr_args", "arguments that the schedule takes", _shown(job), str(error))]
            ) from error
        self._optimizer.step()  # a scheduler warns if none comes before
        self._rates = [self._now()]

    def __call__(self, step: int) -> float:
        """Returns the rate of a step."""
        while len(self._rates) <= step:
            self._scheduler.step()
            self._rates.append(self._now())
        return self._rates[step]

    def _now(self) -> float:
        return _checked(self._name, float(self._optimizer.param_groups[0]["lr"]))


class _Untrained(Optimizer):
    """An optimizer of one parameter that it never changes; its constructor does not import torch's compiler."""

    def __init__(self, rate: float) -> None:
        self.param_groups = [{"params": [torch.zeros((), device="cpu")], "lr": rate}]
        self.defaults: dict[str, Any] = {"lr": rate}

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Changes nothing."""


def _own(job: Job) -> LearningRate:
    """Returns the rates of a class of schedulers, or of a function of the step that returns a factor."""
    named: Any = import_factory("lr_schedule", job.lr_schedule)
    args = {name: plain_argument(value) for name, value in job.lr_args.items()}
    if isinstance(named, type) and issubclass(named, lr_scheduler.LRScheduler):
        if issubclass(named, _NEVER):
            hint = "it needs the loss of a validation, or other schedules; a rate is a function of the step"
            raise UserError([Problem("lr_schedule", "a schedule of the step alone", repr(job.lr_schedule), hint)])
        check_user_args("lr_args", partial(named, _Untrained(job.lr)), job.lr_args)
        return _Stepped(job, named, args)
    check_user_args("lr_args", partial(named, 0), job.lr_args)

    def rate(step: int) -> float:
        with running(f"the schedule {job.lr_schedule}", named):
            factor = named(step, **args)
            if isinstance(factor, bool) or not isinstance(factor, (int, float)):
                raise TypeError(f"expected a number, the factor of lr in step {step}, found {type(factor).__name__}")
        return _checked(job.lr_schedule, job.lr * factor)

    return rate


def _checked(name: str, rate: float) -> float:
    if not (math.isfinite(rate) and rate >= 0):
        hint = f"it gives a rate of {rate}"
        raise UserError([Problem("lr_schedule", "finite rates of at least 0", repr(name), hint)])
    return rate


def _shown(job: Job) -> str:
    return ", ".join(f"{name}={value}" for name, value in job.lr_args.items()) or "none"
