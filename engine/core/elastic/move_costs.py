"""The costs of moves that a run has measured: the time to send a replica, and the pause of a hand-over.

    heal       of a new shadow, from the first word of its owner to the whole replica
    pause      the first step with other owners, less the median of the next five

Rules: as long as nothing was measured, the first guesses count. A hand-over behind which another epoch comes too soon
has no pause. Of several measured values the median counts, so one step in which the machine was busy changes little.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from engine.core.analysis.memory_model import StageBytes, replica_bytes
from engine.core.elastic.measured import BYTES_PER_S, PAUSE_S
from engine.core.recovery.vote import VoteMessage

_LAST = 32  # replicas and hand-overs
_NEXT_STEPS = 5
_NS = 1e9


class MoveCosts(NamedTuple):
    """The heals as (stage, nanoseconds), the pauses in seconds, and the hand-over that is measured now."""

    heals: tuple[tuple[int, int], ...] = ()
    pauses_s: tuple[float, ...] = ()
    owners: tuple[int, ...] = ()  # of the present epoch
    committed_ns: int = 0
    steps_s: tuple[float, ...] | None = None  # since the hand-over; None: no pause is measured


def after_vote(costs: MoveCosts, vote: VoteMessage) -> MoveCosts:
    """Returns the costs with the heals that a vote tells."""
    heals = tuple((each.stage, each.heal_ns) for each in vote.slots if each.heal_ns > 0)
    return costs._replace(heals=(*costs.heals, *heals)[-_LAST:]) if heals else costs


def after_epoch(costs: MoveCosts, owners: tuple[int, ...], *, is_planned: bool) -> MoveCosts:
    """Returns the costs when an epoch begins; a planned one with other owners is a hand-over."""
    is_move = is_planned and costs.owners not in ((), owners)
    return costs._replace(owners=owners, steps_s=() if is_move else None)


def after_commit(costs: MoveCosts, at_ns: int) -> MoveCosts:
    """Returns the costs after a commit; some steps after a hand-over its pause is known."""
    new = costs._replace(committed_ns=at_ns)
    if costs.steps_s is None:
        return new
    steps_s = (*costs.steps_s, (at_ns - costs.committed_ns) / _NS)
    if len(steps_s) <= _NEXT_STEPS:
        return new._replace(steps_s=steps_s)
    pause_s = max(0.0, steps_s[0] - median(steps_s[1:]))
    return new._replace(pauses_s=(*costs.pauses_s, pause_s)[-_LAST:], steps_s=None)


def bytes_per_s(costs: MoveCosts, sizes: Mapping[int, StageBytes]) -> float:
    """Returns the bytes of replicas that are sent in a second."""
    rates = [replica_bytes(sizes[stage]) * _NS / took_ns for stage, took_ns in costs.heals if stage in sizes]
    return max(1.0, median(rates)) if rates else BYTES_PER_S


def pause_s(costs: MoveCosts) -> float:
    """Returns the seconds for which a hand-over delays training."""
    return median(costs.pauses_s) if costs.pauses_s else PAUSE_S
