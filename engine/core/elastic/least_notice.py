"""The least useful notice: how long before its end a worker must tell it for its slots to go to both neighbours whole.

    notice                                            at the latest: the step has just begun
      |-- rest of the open step, without new shadows --|-- a step in which new shadows are healed --|- hand-over -|

A worker whose slots all have whole replicas at their next owners needs the first part and the hand-over alone. With
less than that the accumulators must go in the middle of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from engine.core.elastic.measured import MeasuredFacts
from engine.core.ownership import Ownership, Slot


class LeastNotice(NamedTuple):
    """The seconds of notice from which a worker's slots go at a boundary: to holders, and to the next owners whole."""

    boundary_s: float
    whole_s: float
    copied_bytes: int


def copied_to_next_owners(
    ownership: Ownership,
    leaver: int,
    owners: tuple[int, ...],
    whole: Mapping[int, Collection[Slot]],
    measured: MeasuredFacts,
) -> int:
    """Returns the bytes of the leaver's slots of which the next owners hold no whole replica."""
    grid = ownership.grid
    return sum(
        measured.moved_bytes(slot[1])
        for slot in ownership.slots_of(leaver)
        if slot not in whole.get(owners[grid.place(slot)], ())
    )


def least_notice(copied_bytes: int, bytes_per_s: float, step_s: float, pause_s: float = 0.0) -> LeastNotice:
    """Returns the least notices of a worker in seconds, for the worst moment, which is the begin of a step.

    The copies of all slots leave over the leaver's one connection, beside the training of the step after the open one.
    """
    boundary_s = step_s + pause_s
    heal_s = max(step_s, copied_bytes / bytes_per_s) if copied_bytes else 0.0
    return LeastNotice(boundary_s, boundary_s + heal_s, copied_bytes)
