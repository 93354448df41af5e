"""Worker times: from the votes of the steps to the usual times of stages, the paces of workers and the measured facts.

    vote    the nanoseconds of an owner's forwards and backwards of all microbatches, by slot; the sizes of the slot
    usual   of a stage, on a worker that is not slow: the lower quartile of the last steps, which a busy machine moves
            less than the mean
    pace    of a worker: its seconds of a step for a usual second of the same work

Rules: a step counts when a vote for the next one comes, and only if each slot of a worker has told its times: none does
after a failure in the step. The first step counts for nothing, because it warms up. Another agent begins anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from engine.core.analysis.memory_model import StageBytes, owned_bytes, replica_bytes
from engine.core.config.job import Job
from engine.core.elastic.measured import MeasuredFacts
from engine.core.elastic.move_costs import MoveCosts, after_vote, bytes_per_s, pause_s
from engine.core.elastic.slow_workers import Compute, Pace, PaceChange, after_step, members_only, speeds
from engine.core.ownership import Ownership
from engine.core.recovery.vote import SlotVote, VoteMessage

LEAST_STEPS = 10  # of a stage, before its times are known
_LAST_STEPS = 32
_NS = 1e9

Times = tuple[float, float]  # the seconds of all forwards of a stage in a step, and of all backwards


class WorkerTimes(NamedTuple):
    """The times of the last steps. Mappings are never modified."""

    at: tuple[int, int] = (0, -1)  # the epoch and the open step
    told: Mapping[int, tuple[SlotVote, ...]] = {}  # the votes of owners in them, by worker
    counted: int = 0  # steps
    stages: Mapping[int, tuple[Times, ...]] = {}  # of the last steps on workers that were not slow
    sizes: Mapping[int, StageBytes] = {}
    paces: Mapping[int, Pace] = {}
    costs: MoveCosts = MoveCosts()


def heard(times: WorkerTimes, worker: int, vote: VoteMessage) -> tuple[WorkerTimes, tuple[PaceChange, ...]]:
    """Returns the times after a vote, and the changes of paces that the step before it has shown.

    A vote of a step before the open one is late, or workers have begun again: then nothing of the open step counts.
    """
    changes: tuple[PaceChange, ...] = ()
    if vote.step == times.at[1] + 1:
        times, changes = _closed(times)
    if (vote.epoch, vote.step) != times.at:  # after a failure all workers vote again
        times = times._replace(at=(vote.epoch, vote.step), told={})
    slots = tuple(each for each in vote.slots if each.took_ns)
    sizes = {each.stage: StageBytes(*each.sizes) for each in slots if each.sizes}
    told = {**times.told, worker: (*times.told.get(worker, ()), *slots)}
    costs = after_vote(times.costs, vote)
    return times._replace(told=told, sizes={**times.sizes, **sizes} if sizes else times.sizes, costs=costs), changes


def usual(times: WorkerTimes, stage: int) -> Times | None:
    """Returns the usual seconds of a stage in a step; None as long as too few steps are known."""
    known = times.stages.get(stage, ())
    if len(known) < LEAST_STEPS:
        return None
    forward, backward = zip(*known, strict=True)
    return _lower_quartile(forward), _lower_quartile(backward)


def are_settled(times: WorkerTimes, num_stages: int) -> bool:
    """Returns whether the times of all stages are of as many steps as count: then later ones change them little."""
    return all(len(times.stages.get(stage, ())) == _LAST_STEPS for stage in range(num_stages))


def owned_sizes(times: WorkerTimes, job: Job) -> tuple[int, ...]:
    """Returns the bytes that an owner of each stage holds for a slot; empty as long as those of one are unknown."""
    stages = range(job.slots)
    return tuple(owned_bytes(job, times.sizes[stage]) for stage in stages) if times.sizes.keys() >= {*stages} else ()


def facts(
    times: WorkerTimes,
    job: Job,
    ownership: Ownership,
    members: Collection[int],
    hosts: Mapping[int, str],
    free_bytes: int | None = None,
) -> MeasuredFacts:
    """Returns the facts for an assignment; times are in units as long as one of a stage is unknown.

    `free_bytes` are those of the one host of all members, which may use equal parts of them, as far as they are known.
    """
    grid, known = job.grid, range(job.grid.stages)
    seconds = [found for stage in known if (found := usual(times, stage)) is not None]
    forward, backward = zip(*seconds, strict=True) if len(seconds) == grid.stages else ((), ())
    owned = owned_sizes(times, job)
    memory: dict[int, int] = {}
    if owned and free_bytes is not None:
        share = free_bytes // len(members)
        memory = {each: share + sum(owned[stage] for _, stage in ownership.slots_of(each)) for each in members}
    return MeasuredFacts(
        forward_s=tuple(each / grid.microbatches for each in forward),
        backward_s=tuple(each / grid.microbatches for each in backward),
        speed=speeds(members_only(times.paces, members)),
        replica_bytes=tuple(replica_bytes(times.sizes[stage]) for stage in known) if owned else (),
        owned_bytes=owned,
        memory=memory,
        host_of=hosts,
        bytes_per_s=bytes_per_s(times.costs, times.sizes),
        pause_s=pause_s(times.costs),
    )


def _closed(times: WorkerTimes) -> tuple[WorkerTimes, tuple[PaceChange, ...]]:
    """Returns the times after the open step."""
    whole = {worker: votes for worker, votes in times.told.items() if votes and all(any(e.took_ns) for e in votes)}
    if not whole:
        return times, ()
    if times.counted == 0:
        return times._replace(counted=1), ()
    computed = {worker: found for worker, votes in whole.items() if (found := _computed(times, votes)) is not None}
    paces, changes = after_step(times.paces, times.at[1], computed)
    stages = dict(times.stages)
    for worker, votes in sorted(whole.items()):
        if worker in paces and paces[worker].slowness > 1:
            continue  # else the usual times would follow the slow worker, and it would be well, or slow, for ever
        for each in votes:
            took = each.took_ns[0] / _NS, each.took_ns[1] / _NS
            stages[each.stage] = (*stages.get(each.stage, ()), took)[-_LAST_STEPS:]
    return times._replace(counted=times.counted + 1, stages=stages, paces=paces), changes


def _computed(times: WorkerTimes, votes: Iterable[SlotVote]) -> Compute | None:
    """Returns the seconds of a worker, and the usual ones of the same work; None if these are unknown."""
    seconds = work = 0.0
    for vote in votes:
        each = usual(times, vote.stage)
        if each is None:
            return None
        seconds += sum(vote.took_ns) / _NS
        work += sum(each)
    return Compute(seconds, work) if work > 0 else None


def _lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]
