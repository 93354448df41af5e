"""The way out of a worker that has given notice: at the next step boundary, inside the open step, or not at all.

    open step  |----- spent -----|-------- rest --------|  boundary
    notice                       |---- left ----|          the boundary comes too late: inside the step

Rules: the rest of the open step is a usual step less what is spent of it. If the step takes longer than usual, nobody
knows its rest, and half a second is kept back. Without a usual step the boundary counts as near. The ways are looked at
again at each tick of the clock, so a boundary that does not come is given up in time. Inside the step a worker hands
over to known whole replicas only. With less time than a hand-over takes, its end is a death.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from statistics import median

from engine.core.membership.state import State
from engine.core.membership.verdicts import heirs, unable_to_leave

_S = 1_000_000_000
HAND_OVER_NS = _S // 10  # at least
_LATE_NS = _S // 2  # kept back for a step that takes longer than usual: two ticks of the clock
_SHARE = 10  # of a usual step: the tenth part may be missing in an estimate
_STEPS_OF_JOINERS = 10  # in which waiting workers join, get all replicas and take over, and the leavers go
_DEPARTURE_NS = _S // 2  # so long before its end, or in the second half of its grace, a worker without slots leaves


class WayOut(StrEnum):
    """How a worker leaves."""

    BOUNDARY = "boundary"
    INSIDE = "inside"
    NONE = "none"


def way_out(left_ns: int, spent_ns: int, steps_ns: Collection[int], has_heirs: bool) -> WayOut:
    """Returns the way out with so much time left; `steps_ns` are the durations of the last steps.

    `has_heirs`: other workers hold whole replicas of all its slots.
    """
    if left_ns >= until_boundary_ns(spent_ns, steps_ns) + HAND_OVER_NS:
        return WayOut.BOUNDARY
    return WayOut.INSIDE if has_heirs and left_ns >= HAND_OVER_NS else WayOut.NONE


def until_boundary_ns(spent_ns: int, steps_ns: Collection[int]) -> int:
    """Returns the time until the next boundary, so that it seldom takes longer."""
    if not steps_ns:
        return 0
    usual_ns = round(median(steps_ns))
    return max(usual_ns - spent_ns, 0 if spent_ns < usual_ns else _LATE_NS) + usual_ns // _SHARE


def departs(left_ns: int, grace_ns: int) -> bool:
    """Returns whether a worker that has handed over inside the step must not wait for the boundary any longer."""
    return left_ns <= min(_DEPARTURE_NS, grace_ns // 2)


def can_wait_for_joiners(state: State, grace_ns: int) -> bool:
    """Returns whether waiting workers can take over from all members, if these get so much grace now."""
    if not (state.options.redundant and state.able_to_join and state.steps_ns):
        return False
    return grace_ns >= _STEPS_OF_JOINERS * max(state.steps_ns)


def nobody_takes_over(state: State) -> bool:
    """Returns whether all members have a notice, and no worker stays or waits that could take over from them."""
    return set(state.members) <= set(state.leaving) and not state.able_to_join and bool(unable_to_leave(state))


def has_heirs(state: State, worker: int) -> bool:
    """Returns whether staying workers hold whole replicas of all slots of a leaving worker."""
    return worker not in heirs(state._replace(going=(*state.going, worker)), ()).owners
