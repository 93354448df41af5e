"""The policy of a job that adapts its schedule: when the measured times of stages and edges make another one quicker.

    votes -> usual times of stages, transfers of edges -> dry run of each named schedule -> the schedule that is wanted

Rules: another schedule must save a tenth of the step. That of the job comes back where it is as quick: it was chosen.
Two changes are twenty steps apart at least, so times that flap cost little. No slot moves, and no worker stashes more
than the user allows. While slots are merged after a failure, no schedule orders the steps, and nothing is decided.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from engine.core.job.job import Job
from engine.core.program.owners import owners_compute
from engine.core.program.schedule_csv import is_text, lists_from_csv, placement_of
from engine.core.program.schedule_search import Profile, length_of, most_stash
from engine.core.program.schedules import SCHEDULES, ComputeLists
from engine.core.protocol.events import WantedSchedule
from engine.core.protocol.schedule_change import unfit
from engine.core.protocol.state import Phase, State
from engine.core.protocol.worker_times import EDGE_STEPS, WorkerTimes, members_only, speeds, usual

QUIET_STEPS = 20  # between two changes
LEAST_GAIN = 0.1  # of a step
_AS_QUICK = 1.02
_LOOK_STEPS, _LOOK_NS = 4, 1_000_000_000  # from one look to the next


class ScheduleLook(NamedTuple):
    """The last committed step and the time at the last look, and that step at the last change."""

    at: int = -1
    at_ns: int = 0
    changed: int | None = None


def look(
    last: ScheduleLook, job: Job, state: State, times: WorkerTimes, now_ns: int
) -> tuple[ScheduleLook, WantedSchedule | None]:
    """Returns the look that is due by now, or the last one, and another schedule if one is wanted."""
    step = state.committed
    is_quiet = last.changed is not None and step - last.changed < QUIET_STEPS
    is_early = step - last.at < _LOOK_STEPS or now_ns - last.at_ns < _LOOK_NS
    if is_quiet or is_early or state.phase is not Phase.RUNNING:
        return last, None
    if state.changes_schedule or state.wanted or state.leaving or (profile := measured(job, state, times)) is None:
        return last, None
    better = choice(job, state, profile)
    if better is None:
        return last._replace(at=step, at_ns=now_ns), None
    return ScheduleLook(step, now_ns, step), WantedSchedule(now_ns, *better)


def measured(job: Job, state: State, times: WorkerTimes) -> Profile | None:
    """Returns what the actions of a microbatch take in seconds; None as long as a stage or an edge is not known."""
    slots, stages = range(job.slots), [usual(times, stage) for stage in range(job.slots)]
    known = {stage: median(each) for stage, each in times.edges.items() if len(each) == EDGE_STEPS}
    far = {at for at in slots[:-1] if state.owners[at] != state.owners[at + 1]}
    pairs = [pair for pair in stages if pair is not None]
    if len(pairs) < job.slots or not far <= known.keys():
        return None
    speed = speeds(members_only(times.paces, state.members))
    owners = [{state.owners[at] for at in range(stage, len(state.owners), job.slots)} for stage in slots]
    slower = [max(1 / speed.get(worker, 1.0) for worker in of) / job.microbatches for of in owners]
    forward = tuple(pair[0] * more for pair, more in zip(pairs, slower, strict=True))
    half = tuple(pair[1] * more / 2 for pair, more in zip(pairs, slower, strict=True))
    return Profile(forward, half, half, tuple(known[at] if at in far else 0.0 for at in slots[:-1]))


def choice(job: Job, state: State, profile: Profile) -> tuple[str, str] | None:
    """Returns the schedule that is better than that in use, as a wish has it, and why; None if there is none."""
    using = state.schedule or job.schedule
    if not owners_compute(using, job.grid, state.owners).is_scheduled:
        return None
    length = {"": length_of(_lists(job, job.schedule), profile)}
    placement = placement_of(using, job.placement if not state.schedule else "auto")
    for name, schedule in SCHEDULES.items():
        is_here = job.stages_per_worker == 1 or schedule.placement == placement
        if name != job.schedule and is_here and not schedule.overlaps and not unfit(job, name):
            lists = _lists(job, name)
            if name == state.schedule or most_stash(lists) <= job.adapt_schedule * job.stages_per_worker:
                length[name] = length_of(lists, profile)
    now, quickest = length[state.schedule], min(length, key=length.__getitem__)
    if state.schedule and length[""] <= _AS_QUICK * length[quickest]:
        quickest = ""
    elif length[quickest] > (1 - LEAST_GAIN) * now:
        return None
    slowest = max(range(len(profile.transfer)), key=profile.transfer.__getitem__, default=0)
    edge = f"; a transfer from {job.grid.noun} {slowest} takes {1000 * max(profile.transfer, default=0.0):.3g} ms"
    told = f"by the measured times a step takes {1000 * length[quickest]:.3g} ms instead of {1000 * now:.3g}{edge}"
    return quickest, told


def _lists(job: Job, schedule: str) -> ComputeLists:
    if is_text(schedule):
        return lists_from_csv(schedule)
    return SCHEDULES[schedule](job.stages // job.stages_per_worker, job.microbatches, job.stages_per_worker)
