"""Overlap pairs: a forward and a backward that one worker may run at the same time, as in DualPipeV.

Rules: a pair is a forward and a backward of different microbatches that are neighbours in a worker's program. Their
order names the kind: OVERLAP_F_B or OVERLAP_B_F. Neither depends on the other, so both stay actions of their own for
dependencies, faults and recovery. The pass makes the two neighbours: it moves the receives of the second action before
the pair and the sends of the first behind it. A worker that cannot overlap runs the two in sequence, with the same
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from engine.core.action import COMPUTE_OPS, RECEIVE_OPS, SEND_OPS, Action, Op

Overlap = Literal["OVERLAP_F_B", "OVERLAP_B_F"]
OVERLAPS: dict[tuple[Op, Op], Overlap] = {(Op.F, Op.B): "OVERLAP_F_B", (Op.B, Op.F): "OVERLAP_B_F"}
_TRANSFERS = RECEIVE_OPS | SEND_OPS


def overlap_of(first: Action, second: Action) -> Overlap | None:
    """Returns the kind of pair that two actions form in this order, or None if they form no pair."""
    same = (first.pipeline, first.microbatch) == (second.pipeline, second.microbatch)
    return None if same else OVERLAPS.get((first.op, second.op))


def pairs_of(actions: Sequence[Action]) -> Iterator[tuple[int, Overlap]]:
    """Yields the position and the kind of each pair; of two pairs that share an action, only the earlier."""
    taken = -1
    for second in range(1, len(actions)):
        kind = overlap_of(actions[second - 1], actions[second])
        if kind and second - 1 > taken:
            yield second - 1, kind
            taken = second


def with_pairs_together(program: Mapping[int, tuple[Action, ...]]) -> dict[int, tuple[Action, ...]]:
    """Returns a program in which no transfer stands between the two actions of an OVERLAP_F_B pair.

    A worker then waits for the inputs of both before it runs the first. Only schedules made for overlap profit.
    """
    return {worker: _together(actions) for worker, actions in program.items()}


def _together(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    moved = list(actions)
    computed = [position for position, action in enumerate(actions) if action.op in COMPUTE_OPS]
    last = -1  # the position of the backward of the previous pair
    for first, second in pairwise(computed):
        between = actions[first + 1 : second]
        if (
            first > last
            and overlap_of(actions[first], actions[second]) == "OVERLAP_F_B"
            and _TRANSFERS.issuperset(action.op for action in between)
        ):
            received = [action for action in between if action.op in RECEIVE_OPS]
            sent = [action for action in between if action.op in SEND_OPS]
            moved[first : second + 1] = [*received, actions[first], actions[second], *sent]
            last = second
    return tuple(moved)


def overlapped_costs(cost: Callable[[Action], float], actions: Sequence[Action]) -> list[float]:
    """Returns the cost of each action if pairs overlap: the second of a pair costs max(0, its cost - the first's)."""
    costs = [cost(action) for action in actions]
    for first, _ in pairs_of(actions):
        costs[first + 1] = max(costs[first + 1] - costs[first], 0.0)
    return costs
