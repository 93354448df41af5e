"""Schedules that loop through the workers several times: interleaved 1F1B, its flexible form, and breadth-first.

Interleaved schedules take the microbatches in rounds: a worker runs a round on one of its stages, then on the next.
After a warm-up it runs one forward and one backward in turn. The warm-up is as many forwards as the last worker needs
before its first backward, and two for each worker behind: an activation comes down while a gradient goes up.
"""

from __future__ import annotations

from engine.core.action import Op, make_action
from engine.core.schedules.compute import ComputeLists
from engine.core.schedules.one_stage import one_f_one_b


def interleaved(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Interleaved 1F1B in rounds of P microbatches (Narayanan et al., Megatron-LM, SC 2021); the last takes the rest.

    A round of fewer than P would make a stage's second turn wait for its first.
    """
    num_rounds = max(1, num_microbatches // num_workers)
    rest = num_microbatches - num_workers * (num_rounds - 1)
    return _interleaved(num_workers, stages_per_worker, [num_workers] * (num_rounds - 1) + [rest])


def interleaved_flexible(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Interleaved 1F1B in as many rounds, as even as can be: those of torch's where the number of rounds divides M."""
    num_rounds = max(1, num_microbatches // num_workers)
    each, rest = divmod(num_microbatches, num_rounds)
    return _interleaved(num_workers, stages_per_worker, [each + 1] * rest + [each] * (num_rounds - rest))


def looped_bfs(num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeLists:
    """Breadth-first: all microbatches forward on one stage after another, then back (Lamy-Poirier, MLSys 2023)."""
    every = range(num_microbatches)
    lists = []
    for worker in range(num_workers):
        stages = range(worker, num_workers * stages_per_worker, num_workers)
        actions = [make_action(stage, Op.F, each) for stage in stages for each in every]
        lists.append((*actions, *(make_action(stage, Op.B, each) for stage in reversed(stages) for each in every)))
    return tuple(lists)


def _interleaved(num_workers: int, stages_per_worker: int, rounds: list[int]) -> ComputeLists:
    if stages_per_worker == 1:
        return one_f_one_b(num_workers, 1, sum(rounds))  # the same, with a shorter warm-up
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
    """Returns (stage, microbatch) in order: round by round, in it stage by stage."""
    pairs, first = [], 0
    for size in rounds:
        pairs += [(stage, each) for stage in stages for each in range(first, first + size)]
        first += size
    return pairs
