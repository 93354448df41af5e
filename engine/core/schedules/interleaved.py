"""Schedules with several stages per worker: interleaved 1F1B, its flexible form, and breadth-first.

Interleaved schedules take the microbatches in rounds: a worker runs a round on one of its stages, then on the next.
After a warm-up it alternates forwards and backwards. The warm-up of the last worker lasts until its first backward can
start; each worker before it has two forwards more, the time of one activation down and one gradient up. P = V = 2,
M = 4:

    worker 0  0F0 0F1 2F0 2F1 0F2     2B0 -   0F3 2B1 -   2F2 0B0 -   2F3 0B1 -       2B2 -       2B3 -   0B2 -   0B3 -
    worker 1      1F0 1F1 3F0 3B0 -   3F1 3B1 -   1F2 1B0 -   1F3 1B1 -   3F2 3B2 -   3F3 3B3 -   1B2 -   1B3 -
"""

from __future__ import annotations

from engine.core.action import Op, make_action
from engine.core.schedules.compute import ComputeLists
from engine.core.schedules.one_stage import one_f_one_b


def interleaved(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Returns interleaved 1F1B in rounds of P microbatches (Narayanan et al., Megatron-LM, SC 2021).

    The last round also takes the remainder: in a round of fewer than P, a worker would wait for its own previous stage.
    """
    num_rounds = max(1, num_microbatches // num_workers)
    rest = num_microbatches - num_workers * (num_rounds - 1)
    return _interleaved(num_workers, stages_per_worker, [num_workers] * (num_rounds - 1) + [rest])


def interleaved_flexible(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Returns interleaved 1F1B in M // P rounds of nearly equal size; torch's rounds where their number divides M."""
    num_rounds = max(1, num_microbatches // num_workers)
    each, rest = divmod(num_microbatches, num_rounds)
    return _interleaved(num_workers, stages_per_worker, [each + 1] * rest + [each] * (num_rounds - rest))


def looped_bfs(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Returns breadth-first: all forwards, stage by stage, then all backwards (Lamy-Poirier, MLSys 2023)."""
    every = range(num_microbatches)
    lists = []
    for worker in range(num_workers):
        stages = range(worker, num_workers * stages_per_worker, num_workers)
        actions = [make_action(stage, Op.F, each) for stage in stages for each in every]
        lists.append((*actions, *(make_action(stage, Op.B, each) for stage in reversed(stages) for each in every)))
    return tuple(lists)


def _interleaved(num_workers: int, stages_per_worker: int, rounds: list[int]) -> ComputeLists:
    if stages_per_worker == 1:
        return one_f_one_b(num_workers, 1, sum(rounds))  # which has a shorter warm-up
    lists = []
    for worker in range(num_workers):
        stages = range(worker, num_workers * stages_per_worker, num_workers)
        forwards = [make_action(stage, Op.F, each) for stage, each in _by_round(rounds, stages)]
        backwards = [make_action(stage, Op.B, each) for stage, each in _by_round(rounds, stages[::-1])]
        place = {(stage, each): number for number, (stage, _, each, _) in enumerate(forwards)}
        ahead = max(place[stage, each] - number for number, (stage, _, each, _) in enumerate(backwards))
        num_warm_up = min(ahead + 2 * (num_workers - 1 - worker), len(forwards))
        pairs = zip(forwards[num_warm_up:], backwards, strict=False)
        left = backwards[len(forwards) - num_warm_up :]
        lists.append((*forwards[:num_warm_up], *(action for pair in pairs for action in pair), *left))
    return tuple(lists)


def _by_round(rounds: list[int], stages: range) -> list[tuple[int, int]]:
    """Returns the (stage, microbatch) pairs round by round, and within a round stage by stage."""
    pairs, first = [], 0
    for size in rounds:
        pairs += [(stage, each) for stage in stages for each in range(first, first + size)]
        first += size
    return pairs
