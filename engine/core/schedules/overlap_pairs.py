"""Overlap pairs: a forward and a backward that one worker may run at once, as DualPipeV has them.

Rules: a pair is a forward and a backward of different microbatches that stand next to each other in a worker's program;
the order in the list names it, OVERLAP_F_B or OVERLAP_B_F. Neither needs what the other makes, so each stays an action
of its own, to the happens-before rule, to whoever counts, kills or redoes it; being a pair is said by its place alone.
The pass brings the two together: what the second receives comes before both, what the first sends goes behind both.
Run one after the other, which is what a worker does that was given no way to run them at once, they leave the same.
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
    """Returns what the pair of two actions is called, in this order; None when they are no pair."""
    same = (first.pipeline, first.microbatch) == (second.pipeline, second.microbatch)
    return None if same else OVERLAPS.get((first.op, second.op))


def pairs_of(actions: Sequence[Action]) -> Iterator[tuple[int, Overlap]]:
    """Yields the position of the first of each pair, and the kind of pair; of two that share an action the earlier."""
    taken = -1
    for second in range(1, len(actions)):
        kind = overlap_of(actions[second - 1], actions[second])
        if kind and second - 1 > taken:
            yield second - 1, kind
            taken = second


def with_pairs_together(program: Mapping[int, tuple[Action, ...]]) -> dict[int, tuple[Action, ...]]:
    """Returns a program in which no transfer stands between a forward and the backward that follows it.

    This is for schedules that were made for it: a worker then waits for what both need before it runs the first.
    """
    return {worker: _together(actions) for worker, actions in program.items()}


def _together(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    moved = list(actions)
    computed = [position for position, action in enumerate(actions) if action.op in COMPUTE_OPS]
    last = -1  # the backward of the pair before
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
    """Returns what actions cost when pairs run at once: the second of a pair, what it takes beyond the first."""
    costs = [cost(action) for action in actions]
    for first, _ in pairs_of(actions):
        costs[first + 1] = max(costs[first + 1] - costs[first], 0.0)
    return costs
