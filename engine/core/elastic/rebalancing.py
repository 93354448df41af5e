"""Rebalancing: when to ask the policy, and when a move of its own will waits.

A change of members makes a move that cannot wait: a leaver's slots need owners, and a joiner gets its share. A change
of speed makes a move of the policy's own will, at most one in fifty steps. So a speed that flaps costs no more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from engine.core.elastic.assignment import Assignment

QUIET_STEPS = 50  # between two moves of the policy's own will


class Rebalancing(NamedTuple):
    """The workers and speeds for which the policy was asked last, and the step of the last move of its own will."""

    workers: tuple[int, ...]
    speeds: tuple[tuple[int, float], ...] = ()
    moved: int | None = None


def is_due(state: Rebalancing, step: int, workers: Collection[int], speeds: Mapping[int, float]) -> bool:
    """Returns whether to ask the policy: workers have changed, or speeds, and its last move is long ago."""
    if _have_changed(state, workers):
        return True
    return _in_order(speeds) != state.speeds and (state.moved is None or step - state.moved >= QUIET_STEPS)


def after_assignment(
    state: Rebalancing,
    step: int,
    workers: Collection[int],
    speeds: Mapping[int, float],
    present: tuple[int, ...],
    wanted: Assignment,
) -> Rebalancing:
    """Returns the state after the policy was asked about the `present` owners."""
    of_own_will = wanted.owners != present and not _have_changed(state, workers)
    return Rebalancing(tuple(sorted(workers)), _in_order(speeds), step if of_own_will else state.moved)


def _have_changed(state: Rebalancing, workers: Collection[int]) -> bool:
    return tuple(sorted(workers)) != state.workers


def _in_order(speeds: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(speeds.items()))
