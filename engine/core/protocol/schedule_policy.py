"""The policy of a job that adapts its schedule: when the measured times of stages and edges make another one quicker.

    votes -> usual times of stages, transfers of edges -> dry run of each named schedule -> the schedule that is wanted

Rules: another schedule must save a tenth of the step. That of the job comes back where it is as quick: it was chosen.
Two changes are twenty steps apart at least, so times that flap cost little. The present owners stay: only schedules
that order the runs of blocks that they have by now count, and no worker stashes more than the user allows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from engine.core.job.job import Job
from engine.core.job.job_rules import MOST_ADAPTED
from engine.core.ownership import Grid, directions_of
from engine.core.program.owners import OwnersCompute, owners_compute
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
    """Returns what the actions of a microbatch take in seconds; None as long as a slot or an edge is not known."""
    slots, usuals = range(job.slots), [usual(times, slot) for slot in range(job.slots)]
    known = {slot: median(each) for slot, each in times.edges.items() if len(each) == EDGE_STEPS}
    owners = [state.owners[slot :: job.slots] for slot in slots]  # of each slot in all pipelines
    far = {slot for slot, (here, there) in enumerate(pairwise(owners)) if here != there}
    pairs = [pair for pair in usuals if pair is not None]
    if len(pairs) < job.slots or not far <= known.keys():
        return None
    speed = speeds(members_only(times.paces, state.members))
    slower = [max(1 / speed.get(worker, 1.0) for worker in of) / job.program_microbatches for of in owners]
    forward = tuple(pair[0] * more for pair, more in zip(pairs, slower, strict=True))
    half = tuple(pair[1] * more / 2 for pair, more in zip(pairs, slower, strict=True))
    return Profile(forward, half, half, tuple(known[slot] if slot in far else 0.0 for slot in slots[:-1]))


def choice(job: Job, state: State, profile: Profile) -> tuple[str, str] | None:
    """Returns the schedule that is better than that in use, as a wish has it, and why; None if there is none."""
    grid, owners = _distinct(job, state.owners)
    if grid.stages * grid.microbatches * grid.pipelines > MOST_ADAPTED * directions_of(job.schedule):
        return None
    length = {"": length_of(_lines(owners_compute(job.schedule, grid, owners)), profile)}
    most = job.adapt_schedule * job.stages_per_worker * job.blocks * job.slices  # of slots
    for name, schedule in SCHEDULES.items():
        if name == job.schedule or schedule.overlaps or unfit(job, name):
            continue
        compute, is_used = owners_compute(name, grid, owners), name == state.schedule
        if not (is_used or compute.is_scheduled):
            continue
        lines = _lines(compute)
        if is_used or most_stash(lines) <= most:
            length[name] = length_of(lines, profile)
    now, quickest = length[state.schedule], min(length, key=length.__getitem__)
    if state.schedule and length[""] <= _AS_QUICK * length[quickest]:
        quickest = ""
    elif length[quickest] > (1 - LEAST_GAIN) * now:
        return None
    slowest = max(range(len(profile.transfer)), key=profile.transfer.__getitem__, default=0)
    edge = f"; a transfer from {job.grid.noun} {slowest} takes {1000 * max(profile.transfer, default=0.0):.3g} ms"
    reason = f"by the measured times a step takes {1000 * length[quickest]:.3g} ms instead of {1000 * now:.3g}{edge}"
    return quickest, reason


def _distinct(job: Job, owners: tuple[int, ...]) -> tuple[Grid, tuple[int, ...]]:
    """Returns the grid and owners of the first pipeline (or pair) if all are cut alike, each by its own workers."""
    ways = directions_of(job.schedule)
    size = ways * job.slots
    parts = [owners[at : at + size] for at in range(0, len(owners), size)]
    shapes = {tuple(map([*dict.fromkeys(part)].index, part)) for part in parts}
    if len(shapes) > 1 or sum(len({*part}) for part in parts) > len({*owners}):
        return job.grid, owners
    return replace(job.grid, pipelines=ways), parts[0]


def _lines(compute: OwnersCompute) -> ComputeLists:
    return tuple(compute.program().values())
