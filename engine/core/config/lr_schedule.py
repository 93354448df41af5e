"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

# Maps progress after the warm-up, in [0, 1), to a factor of the peak learning rate.
LR_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def warming_up(peak: float, step: int, warmup_steps: int) -> float:
    """Returns the rate of a step of the warm-up: linear, and `peak` in its last step."""
    return peak * (step + 1) / warmup_steps


def learning_rate(name: str, peak: float, step: int, num_steps: int, warmup_steps: int) -> float:
    """Returns the rate of `step` (0-based): linear warm-up to `peak`, then the named decay until the last step."""
    if step < warmup_steps:
        return warming_up(peak, step, warmup_steps)
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * LR_SCHEDULES[name](progress)
