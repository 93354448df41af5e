"""The scale of the loss in float16, as torch.amp.GradScaler defines it: a pure rule of the steps before.

A small gradient is zero in float16, so the loss is multiplied by a scale before the backward, and the gradients are
divided by it before they are clipped. A step whose gradients are not all finite is skipped, and the scale becomes
smaller. After enough other steps in a row it becomes greater. Scales are float32 numbers, as torch keeps them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from engine.core.config.job import Job
from engine.core.config.torch_parts import Argument, argument_problems
from engine.core.errors import Problem
from engine.core.scalar import MOST_FLOAT

SCALER_ARGUMENTS = {
    "init_scale": Argument("number", 65536.0),
    "growth_factor": Argument("number", 2.0),
    "backoff_factor": Argument("number", 0.5),
    "growth_interval": Argument("whole", 2000),
}
LEAST_SCALE = 2.0**-24  # the smallest float16; below it no gradient can be too large because of the scale


class LossScale(NamedTuple):
    """The scale of a step, and the number of good steps in a row since it has changed."""

    scale: float
    good_steps: int = 0


class LossScaling(NamedTuple):
    """The rule of a job."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def first(self) -> LossScale:
        """Returns the scale of the first step."""
        return LossScale(_float32(self.init_scale))

    def after(self, now: LossScale, *, is_skipped: bool) -> LossScale:
        """Returns the scale of the step after one with the scale `now`."""
        if is_skipped:
            return LossScale(_float32(now.scale * self.backoff_factor))
        if now.good_steps + 1 < self.growth_interval:
            return LossScale(now.scale, now.good_steps + 1)
        grown = now.scale * self.growth_factor
        return LossScale(_float32(grown) if grown <= MOST_FLOAT else now.scale)


def loss_scaling(job: Job) -> LossScaling | None:
    """Returns the rule of a job; None where the loss is not scaled."""
    return LossScaling(**job.scaler_args) if job.dtype == "float16" else None  # type: ignore[arg-type]


def inverse_of(scale: float) -> float:
    """Returns the factor of gradients that takes a scale away, as torch rounds it."""
    return _float32(1.0 / scale)


def scaling_problems(job: Job) -> Iterator[Problem]:
    """Yields the problems with the arguments of the scale."""
    if job.dtype != "float16":
        for name in job.scaler_args:
            yield Problem(f"scaler_args.{name}", "dtype float16 beside it", job.dtype, "no other dtype needs a scale")
        return
    if problems := argument_problems("scaler_args", SCALER_ARGUMENTS, job.scaler_args):
        yield from problems
        return
    rule = LossScaling(**job.scaler_args)  # type: ignore[arg-type]
    wanted = {
        "init_scale": (rule.init_scale >= LEAST_SCALE, "a number >= 2 ** -24"),
        "growth_factor": (rule.growth_factor > 1, "a number > 1"),
        "backoff_factor": (0 < rule.backoff_factor < 1, "a number > 0 and < 1"),
        "growth_interval": (rule.growth_interval >= 1, "a whole number >= 1"),
    }
    for name, (holds, expected) in wanted.items():
        if not holds:
            yield Problem(f"scaler_args.{name}", expected, repr(job.scaler_args[name]))


def _float32(number: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    return float(rounded) if math.isfinite(rounded) else MOST_FLOAT
