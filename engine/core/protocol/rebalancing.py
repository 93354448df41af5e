"""Rebalancing: when the policy of an elastic job is asked for other owners; and how a worker leaves.

Rules: the host of the coordinator asks at a tick of the clock: no verdict and no commit must wait for the search. It
asks at a verdict, too, that takes workers in, while all members count their inventories: so these get their slots with
the plan of that epoch, and become shadows in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from engine.core.job.job import Job
from engine.core.ownership import Ownership
from engine.core.protocol.assignment import Assignment, ScheduleOrder, assign
from engine.core.protocol.events import MemoryShortage, WantedOwners
from engine.core.protocol.state import Phase, State, is_unknown
from engine.core.protocol.verdicts import heirs, unable_to_leave
from engine.core.protocol.worker_times import WorkerTimes, are_settled, facts, members_only, owned_sizes, speeds
from engine.core.texts import size_text

# Cramped workers: which newcomers have no memory for one slot, and wait.
#
# Rules: the memory that the host has free is shared out to equal parts, one for each member that stays and one for each
# newcomer that has enough, as the policy shares it out. Newcomers that have enough keep it before others get some, and
# a cramped one needs a tenth more than a slot takes: so memory that comes and goes changes little. The host looks when
# members, newcomers or the sizes of slots change, and each ten seconds while a worker is cramped or waits.


LOOK_AGAIN_NS = 10_000_000_000
_AGAIN_PERCENT = 110  # of a slot, for a worker that is cramped


class MemoryLook(NamedTuple):
    """What the last look was about, and its time."""

    about: tuple[tuple[int, ...], ...] = ()
    at_ns: int = 0


def look_for_memory(
    last: MemoryLook,
    job: Job,
    known: State,
    newcomers: Collection[int],
    now_ns: int,
    times: WorkerTimes,
    free_bytes: Callable[[], int | None],
) -> tuple[MemoryLook, MemoryShortage | None]:
    """Returns the last look, and the workers that are cramped if these are others; `newcomers` also load."""
    near = tuple(sorted(each for each in newcomers if each in known.waiting or is_unknown(known, each)))
    sizes = owned_sizes(times, job)
    if not (near or known.cramped) or not sizes or known.is_over:
        return last, None
    staying = tuple(worker for worker in known.members if worker not in known.leaving)
    about = (staying, near, known.waiting, sizes)
    if about == last.about and now_ns - last.at_ns < LOOK_AGAIN_NS:
        return last, None
    cramped = _cramped(job, known, len(staying), near, min(sizes), free_bytes())
    is_news = cramped.keys() != known.cramped.keys()
    return MemoryLook(about, now_ns), MemoryShortage(now_ns, cramped) if is_news else None


def _cramped(
    job: Job, known: State, num_members: int, near: Collection[int], least: int, free_bytes: int | None
) -> dict[int, str]:
    if free_bytes is None:
        return {}
    reasons, parts = dict[int, str](), num_members
    for worker in sorted(near, key=lambda number: (number in known.cramped, number not in known.eager, number)):
        part = free_bytes // (parts + 1)
        if 100 * part >= least * (_AGAIN_PERCENT if worker in known.cramped else 100):
            parts += 1
            continue
        text = f"keeps waiting: one {job.slot_noun} takes {size_text(least)}, and it has {size_text(part)}"
        reasons[worker] = known.cramped.get(worker, text)
    return reasons


# Rebalancing: when to ask the policy, and when a move of its own will waits.
#
# A change of members makes a move that cannot wait: a leaver's slots need owners, and a joiner gets its share. A change
# of speed makes a move of the policy's own will, at most one in fifty steps. So a speed that flaps costs no more. So
# does the first knowledge of the times of stages, if they are far from the equal ones that were assumed.

QUIET_STEPS = 50  # between two moves of the policy's own will
_LEAST_GAIN_OF_TIMES = 0.1  # of a step, for a move only because times became known: they are noisy


class Rebalancing(NamedTuple):
    """The workers, speeds and schedule for which the policy was asked last, and the step of its last own move."""

    workers: tuple[int, ...]
    speeds: tuple[tuple[int, float], ...] = ()
    moved: int | None = None
    knew_times: bool = False
    schedule: str = ""  # with another one the policy is asked as if workers had changed


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


class Wish(NamedTuple):
    """What the policy was asked about, its answer in words, and the wanted owners if they are others."""

    asked: Rebalancing
    why: str = ""  # empty if it was not asked
    wanted: WantedOwners | None = None


def wish(
    asked: Rebalancing,
    job: Job,
    known: State,
    now_ns: int,
    times: WorkerTimes | None = None,
    free_bytes: Callable[[], int | None] = lambda: None,
    *,
    takes_in: bool = False,
) -> Wish:
    """Asks the policy if that is due; `free_bytes` are those of the host of all workers, as far as they are known.

    `takes_in`: a verdict has just taken workers in, and the document of its plan is not made.
    """
    times = times or WorkerTimes()
    staying = tuple(worker for worker in known.members if worker not in known.leaving)
    workers = (*staying, *known.joiners) if staying else ()
    slow, settled = speeds(members_only(times.paces, workers)), are_settled(times, job.slots)
    if not (known.phase is Phase.RUNNING or (takes_in and known.awaits_inventories)) or not workers:
        return Wish(asked)
    order = ScheduleOrder(known.schedule or job.schedule, job.stages_per_worker)
    told, asked = asked, asked if asked.schedule == known.schedule else asked._replace(workers=())
    if not is_due(asked, known.committed, workers, slow, knows_times=settled):
        return Wish(told)
    ownership = Ownership(job.grid, known.owners, known.shadows)
    whole = {worker: ownership.held_by(worker) for worker in workers}
    measured = facts(times, job, ownership, workers, known.nodes, free_bytes())
    assignment = assign(ownership, workers, measured, whole, order)
    why, owners, going_on = assignment.why, assignment.owners, known.wanted or known.owners
    # A wish that is carried out goes on: a leaver must lose its slots, and a joiner get them.
    may_go_on = {*going_on} <= {*workers} and owners not in (known.owners, going_on)
    if may_go_on and not is_worth_it(asked, workers, slow, assignment):
        why, owners = f"nothing moves, because the times of few steps are noisy; else {why}", going_on
    is_news = owners != going_on
    moves = is_news and owners != known.owners
    new = after_assignment(asked, known.committed, workers, slow, moves=moves, knows_times=settled)
    new = new._replace(schedule=known.schedule)
    return Wish(new, why, WantedOwners(now_ns, owners, why) if is_news else None)


# The way out of a worker that has given notice: at the next step boundary, inside the open step, or not at all.
#
#     open step  |----- spent -----|-------- rest --------|  boundary
#     notice                       |---- left ----|          the boundary comes too late: inside the step
#
# Rules: the rest of the open step is a usual step less what is spent of it. If the step takes longer than usual, nobody
# knows its rest, and half a second is kept back. Without a usual step the boundary counts as near. The ways are looked
# at again at each tick of the clock, so a boundary that does not come is given up in time. Inside the step a worker
# hands over to known whole replicas only. With less time than a hand-over takes, its end is a death.

_S = 1_000_000_000
HAND_OVER_NS = _S // 10  # at least
_LATE_NS = _S // 2  # kept back for a step that takes longer than usual: two ticks of the clock
_SHARE = 10  # of a usual step: the tenth part may be missing in an estimate
_STEPS_OF_JOINERS = 10  # in which waiting workers join, get all replicas and take over, and the leavers go
_DEPARTURE_NS = _S // 2  # so long before its end, or in the second half of its grace, a worker without slots leaves


class LeaveStrategy(StrEnum):
    """How a worker leaves."""

    BOUNDARY = "boundary"
    INSIDE = "inside"
    NONE = "none"


def way_out(left_ns: int, spent_ns: int, steps_ns: Collection[int], has_heirs: bool) -> LeaveStrategy:
    """Returns the way out with so much time left; `steps_ns` are the durations of the last steps.

    `has_heirs`: other workers hold whole replicas of all its slots.
    """
    if left_ns >= until_boundary_ns(spent_ns, steps_ns) + HAND_OVER_NS:
        return LeaveStrategy.BOUNDARY
    return LeaveStrategy.INSIDE if has_heirs and left_ns >= HAND_OVER_NS else LeaveStrategy.NONE


def until_boundary_ns(spent_ns: int, steps_ns: Collection[int]) -> int:
    """Returns the time until the next boundary, so that it seldom takes longer."""
    if not steps_ns:
        return 0
    usual_ns = round(median(steps_ns))
    return max(usual_ns - spent_ns, 0 if spent_ns < usual_ns else _LATE_NS) + usual_ns // _SHARE


def departs(left_ns: int, grace_ns: int) -> bool:
    """Returns whether a worker that has handed over inside the step must not wait for the boundary any longer."""
    return left_ns <= departure_ns(grace_ns)


def departure_ns(grace_ns: int) -> int:
    """Returns how long before the end of its grace such a worker leaves."""
    return min(_DEPARTURE_NS, grace_ns // 2)


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
