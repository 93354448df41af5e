"""Rebalancing: when to ask the policy, and when a move of its own will waits.

A change of members makes a move that cannot wait: a leaver's slots need owners, and a joiner gets its share. A change
of speed makes a move of the policy's own will, at most one in fifty steps. So a speed that flaps costs no more. So does
the first knowledge of the times of stages, if they are far from the equal ones that were assumed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from engine.core.elastic.assignment import Assignment

QUIET_STEPS = 50  # between two moves of the policy's own will
_LEAST_GAIN_OF_TIMES = 0.1  # of a step, for a move only because times became known: they are noisy


class Rebalancing(NamedTuple):
    """The workers and speeds for which the policy was asked last, and the step of the last move of its own will."""

    workers: tuple[int, ...]
    speeds: tuple[tuple[int, float], ...] = ()
    moved: int | None = None
    knew_times: bool = False


def is_due(
    state: Rebalancing, step: int, workers: Collection[int], speeds: Mapping[int, float], *, knows_times: bool = False
) -> bool:
    """Returns whether to ask the policy: workers have changed; or speeds or known times, and its last move is long ago.

    Times that are known stay known.
    """
    if _have_changed(state, workers):
        return True
    is_news = _in_order(speeds) != state.speeds or (knows_times and not state.knew_times)
    return is_news and (state.moved is None or step - state.moved >= QUIET_STEPS)


def is_worth_it(state: Rebalancing, workers: Collection[int], speeds: Mapping[int, float], wanted: Assignment) -> bool:
    """Returns whether to carry out the answer of the policy: one about times alone must gain much."""
    is_of_times = not _have_changed(state, workers) and _in_order(speeds) == state.speeds
    return not is_of_times or wanted.gain >= _LEAST_GAIN_OF_TIMES


def after_assignment(
    state: Rebalancing,
    step: int,
    workers: Collection[int],
    speeds: Mapping[int, float],
    *,
    moves: bool,
    knows_times: bool = False,
) -> Rebalancing:
    """Returns the state after the policy was asked, and its answer `moves` slots or not."""
    of_own_will = moves and not _have_changed(state, workers)
    moved = step if of_own_will else state.moved
    return Rebalancing(tuple(sorted(workers)), _in_order(speeds), moved, state.knew_times or knows_times)


def _have_changed(state: Rebalancing, workers: Collection[int]) -> bool:
    return tuple(sorted(workers)) != state.workers


def _in_order(speeds: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(speeds.items()))
