"""Schedules of one stage per worker: GPipe and 1F1B."""

from __future__ import annotations

from engine.core.action import Action, Op
from engine.core.schedules.compute import ComputeLists


def gpipe(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019, section 2.3)."""
    assert stages_per_worker == 1
    return tuple(_warm_up_then_pairs(stage, num_microbatches, num_microbatches) for stage in range(num_workers))


def one_f_one_b(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """1F1B: stage s holds residuals of at most P - s microbatches (Narayanan et al., PipeDream-Flush, ICML 2021)."""
    assert stages_per_worker == 1
    return tuple(_warm_up_then_pairs(stage, num_workers - stage - 1, num_microbatches) for stage in range(num_workers))


def _warm_up_then_pairs(stage: int, num_warm_up: int, num_microbatches: int) -> tuple[Action, ...]:
    """Returns `num_warm_up` forwards, then forward and backward in turn, then the backwards that are left."""
    num_warm_up = min(num_warm_up, num_microbatches)
    actions = [Action(stage, Op.F, microbatch) for microbatch in range(num_warm_up)]
    for microbatch in range(num_warm_up, num_microbatches):
        actions += [Action(stage, Op.F, microbatch), Action(stage, Op.B, microbatch - num_warm_up)]
    first_left = num_microbatches - num_warm_up
    actions += [Action(stage, Op.B, microbatch) for microbatch in range(first_left, num_microbatches)]
    return tuple(actions)
