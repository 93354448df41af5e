"""Schedules of one stage per worker: GPipe, 1F1B and eager-1F1B.

They differ in the number of forwards that stand before the pairs of a forward and a backward: all of them, one for each
stage behind this one, or two. With P = 3 and M = 4, if a backward takes twice the time of a forward:

GPipe     worker 0  0F0 0F1 0F2 0F3                         0B0 -   0B1 -   0B2 -   0B3 -
          worker 1      1F0 1F1 1F2 1F3             1B0 -   1B1 -   1B2 -   1B3 -
          worker 2          2F0 2F1 2F2 2F3 2B0 -   2B1 -   2B2 -   2B3 -

1F1B      worker 0  0F0 0F1 0F2                 0B0 -   0F3 0B1 -       0B2 -       0B3 -
          worker 1      1F0 1F1         1B0 -   1F2 1B1 -   1F3 1B2 -       1B3 -
          worker 2          2F0 2B0 -   2F1 2B1 -   2F2 2B2 -   2F3 2B3 -

eager     worker 0  0F0 0F1 0F2 0F3             0B0 -       0B1 -       0B2 -       0B3 -
          worker 1      1F0 1F1 1F2     1B0 -   1F3 1B1 -       1B2 -       1B3 -
          worker 2          2F0 2B0 -   2F1 2B1 -   2F2 2B2 -   2F3 2B3 -

In 1F1B a value is used as soon as it is made, so the time of a transfer comes on top, twice for each hop in a round of
P microbatches. Eager-1F1B has one more microbatch under way for each hop. A transfer that takes up to (F + B) / 2 then
delays the fill and the drain, and nothing between them.
"""

from __future__ import annotations

from engine.core.action import Action, Op
from engine.core.errors import ensure
from engine.core.schedules.compute import ComputeLists


def gpipe(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Returns GPipe: all forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019, section 2.3)."""
    ensure(stages_per_worker == 1, f"one stage per worker, not {stages_per_worker}")
    return tuple(_warm_up_then_pairs(stage, num_microbatches, num_microbatches) for stage in range(num_workers))


def one_f_one_b(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Returns 1F1B: stage s holds at most P - s residuals (Narayanan et al., PipeDream-Flush, ICML 2021)."""
    ensure(stages_per_worker == 1, f"one stage per worker, not {stages_per_worker}")
    return tuple(_warm_up_then_pairs(stage, num_workers - stage - 1, num_microbatches) for stage in range(num_workers))


def eager_one_f_one_b(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Returns eager 1F1B: stage s holds at most 2 (P - s) - 1 residuals (Zhuang et al., MLSys 2023, section 4).

    That is one more than 1F1B for each hop from the stage to the last one: the microbatches that are under way.
    """
    ensure(stages_per_worker == 1, f"one stage per worker, not {stages_per_worker}")
    return tuple(
        _warm_up_then_pairs(stage, 2 * (num_workers - stage - 1), num_microbatches) for stage in range(num_workers)
    )


def _warm_up_then_pairs(stage: int, num_warm_up: int, num_microbatches: int) -> tuple[Action, ...]:
    """Returns `num_warm_up` forwards, then forwards and backwards in turn, then the remaining backwards."""
    num_warm_up = min(num_warm_up, num_microbatches)
    actions = [Action(stage, Op.F, microbatch) for microbatch in range(num_warm_up)]
    for microbatch in range(num_warm_up, num_microbatches):
        actions += [Action(stage, Op.F, microbatch), Action(stage, Op.B, microbatch - num_warm_up)]
    first_left = num_microbatches - num_warm_up
    actions += [Action(stage, Op.B, microbatch) for microbatch in range(first_left, num_microbatches)]
    return tuple(actions)
