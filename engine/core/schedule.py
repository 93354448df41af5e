"""Schedules: rules that make the compute actions of one pipeline, one stage per worker.

A generator maps (stages P, microbatches M) to one list of actions per stage. It knows nothing of transfers,
reduction or commit: passes add those. Backwards come in microbatch order, so that gradients are always added in
the same order, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.action import Action, Op

ComputeLists = tuple[tuple[Action, ...], ...]


def gpipe(num_stages: int, num_microbatches: int) -> ComputeLists:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019, section 2.3)."""
    return tuple(_warm_up_then_pairs(stage, num_microbatches, num_microbatches) for stage in range(num_stages))


def one_f_one_b(num_stages: int, num_microbatches: int) -> ComputeLists:
    """1F1B: stage s holds residuals of at most P - s microbatches (Narayanan et al., PipeDream-Flush, ICML 2021)."""
    return tuple(_warm_up_then_pairs(stage, num_stages - stage - 1, num_microbatches) for stage in range(num_stages))


def _warm_up_then_pairs(stage: int, num_warm_up: int, num_microbatches: int) -> tuple[Action, ...]:
    """Returns `num_warm_up` forwards, then forward and backward in turn, then the backwards that are left."""
    num_warm_up = min(num_warm_up, num_microbatches)
    actions = [Action(stage, Op.F, microbatch) for microbatch in range(num_warm_up)]
    for microbatch in range(num_warm_up, num_microbatches):
        actions += [Action(stage, Op.F, microbatch), Action(stage, Op.B, microbatch - num_warm_up)]
    first_left = num_microbatches - num_warm_up
    actions += [Action(stage, Op.B, microbatch) for microbatch in range(first_left, num_microbatches)]
    return tuple(actions)


SCHEDULES: dict[str, Callable[[int, int], ComputeLists]] = {"1f1b": one_f_one_b, "gpipe": gpipe}
