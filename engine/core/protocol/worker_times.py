"""Worker times: from the votes of the steps to the usual times of stages, the paces of workers and the measured facts.

    vote    the nanoseconds of an owner's forwards and backwards of all microbatches, by slot; the sizes of the slot
    usual   of a stage, on a worker that is not slow: the lower quartile of the last steps, which a busy machine moves
            less than the mean
    pace    of a worker: its seconds of a step for a usual second of the same work

Rules: a step counts when a vote for the next one comes, and only if each slot of a worker has reported its times: none
does after a failure in the step. The first step warms up and does not count. Another agent begins again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from operator import sub
from statistics import median
from typing import NamedTuple

from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes, owned_bytes, replica_bytes
from engine.core.ownership import Ownership
from engine.core.program.ballot import SlotVote, VoteChain, VoteMessage, in_order
from engine.core.protocol.measured_facts import BYTES_PER_S, PAUSE_S, MeasuredFacts

# Slow workers: the pace of each worker against its own past, and the decision which of them are slow.
#
#     pace     seconds of its compute actions in a step, for each unit of work in them; waiting does not count
#     usual    median of its past paces
#     factor   pace / usual, over that of the machine: three quarters of the workers are at least that slow
#
# A worker is slow after eight steps in a row, with a second of computing in them, that have a factor of 1.5 or more, if
# nine tenths of its past were faster than each: its speed is then 1 / factor. The second keeps a job with steps of
# milliseconds from judging by one time slice of a busy core. It stays slow until most of its last steps were well.
# Rules: no worker is evicted for its pace. A busy machine slows all workers, and makes none of them slow. A slow worker
# that computed nothing for a thousand steps is tried again, with a part of the work.


SLOW_FACTOR = 1.5
SLOW_STEPS = 8  # in a row
SLOW_S = 1.0  # of computing in them
WELL_STEPS = 25  # the last ones, of which most must be well
_MOST_WELL = 0.8
_WELL_FACTOR = 1.25
_PAST_STEPS = 50
_FASTER = 0.9  # of the past than a slow step
_LEAST_PAST = 10  # before a worker is judged
_IDLE_STEPS = 1000  # of a slow worker that owns nothing, before it is tried again
_TRIED_SLOWNESS = 2.0


class Compute(NamedTuple):
    """The seconds of a worker's compute actions in a step, and the usual cost of these actions in any unit."""

    seconds: float
    work: float


class Pace(NamedTuple):
    """The past paces of one worker, its slow last steps, and the factor of a slow worker."""

    past: tuple[float, ...] = ()
    doubt: tuple[float, ...] = ()  # of the last steps if they were slow; another one makes all of them the past
    doubt_s: float = 0.0  # of computing in these steps
    factors: tuple[float, ...] = ()  # at most `WELL_STEPS`, of a slow worker
    slowness: float = 1.0
    idle: int = 0  # steps without work, of a slow worker


Paces = Mapping[int, Pace]


class PaceChange(NamedTuple):
    """A worker that has become slow, slower, less slow or well (1), with the figures in words."""

    step: int
    worker: int
    slowness: float
    why: str


def after_step(paces: Paces, step: int, computed: Mapping[int, Compute]) -> tuple[Paces, tuple[PaceChange, ...]]:
    """Returns the paces and their changes, by worker, after a step without a failure."""
    now = {worker: each.seconds / each.work for worker, each in sorted(computed.items()) if each.work > 0}
    factors = {
        worker: pace / median(paces[worker].past)
        for worker, pace in now.items()
        if worker in paces and len(paces[worker].past) >= _LEAST_PAST
    }
    machine = max(1.0, sorted(factors.values())[(len(factors) - 1) // 4]) if factors else 1.0
    new, changes = dict(paces), []
    for worker, pace in now.items():
        was = new.get(worker, Pace())
        if worker not in factors:
            new[worker] = Pace((*was.past, pace))
        elif was.slowness > 1:
            new[worker] = _pace_of_slow(was, factors[worker] / machine)
        else:
            new[worker] = _judged(was, pace / machine, computed[worker].seconds)
        if new[worker].slowness != was.slowness:
            changes.append(PaceChange(step, worker, new[worker].slowness, _words(worker, was, new[worker])))
    for worker in sorted(worker for worker, was in paces.items() if worker not in now and was.slowness > 1):
        new[worker] = _idle(paces[worker])
        if new[worker].slowness < paces[worker].slowness:
            text = f"worker {worker}, which was slow, is tried again: it computed nothing for {_IDLE_STEPS} steps"
            changes.append(PaceChange(step, worker, new[worker].slowness, text))
    return new, tuple(changes)


def members_only(paces: Paces, members: Iterable[int]) -> Paces:
    """Returns the paces of the members; a worker that comes back begins without a past."""
    return {worker: paces[worker] for worker in sorted(members) if worker in paces}


def speeds(paces: Paces) -> dict[int, float]:
    """Returns the speed of each slow worker, below 1; all others have their usual one."""
    return {worker: 1 / pace.slowness for worker, pace in sorted(paces.items()) if pace.slowness > 1}


def _judged(was: Pace, pace: float, seconds: float) -> Pace:
    """Returns the pace of a worker that was not slow after a step with so many seconds of computing."""
    usual, doubt = median(was.past), (*was.doubt, pace)[-_PAST_STEPS:]
    if pace < max(SLOW_FACTOR * usual, sorted(was.past)[int(_FASTER * len(was.past))]):
        return Pace((*was.past, *doubt)[-_PAST_STEPS:])
    doubt_s = was.doubt_s + seconds
    if len(doubt) < SLOW_STEPS or doubt_s < SLOW_S:
        return was._replace(doubt=doubt, doubt_s=doubt_s)
    return Pace(was.past, slowness=median(doubt[-SLOW_STEPS:]) / usual)


def _pace_of_slow(was: Pace, factor: float) -> Pace:
    """Returns the pace of a slow worker after a step: slower still, less slow, or well."""
    factors = (*was.factors, factor)[-WELL_STEPS:]
    was = was._replace(factors=factors)
    if len(factors) >= SLOW_STEPS and min(factors[-SLOW_STEPS:]) >= SLOW_FACTOR * was.slowness:
        return Pace(was.past, slowness=median(factors[-SLOW_STEPS:]))
    better = max(_WELL_FACTOR, was.slowness / SLOW_FACTOR)
    if len(factors) == WELL_STEPS and sum(each <= better for each in factors) >= _MOST_WELL * WELL_STEPS:
        return Pace(was.past, slowness=median(factors) if median(factors) >= SLOW_FACTOR else 1.0)
    return was


def _idle(was: Pace) -> Pace:
    if was.idle + 1 < _IDLE_STEPS:
        return was._replace(idle=was.idle + 1)
    return Pace(was.past, slowness=min(was.slowness, _TRIED_SLOWNESS))


def _words(worker: int, was: Pace, now: Pace) -> str:
    if now.slowness == 1:
        return f"worker {worker} is as fast as usual again: most of its last {WELL_STEPS} steps took their usual time"
    if now.slowness > was.slowness:
        return (
            f"worker {worker} is slow: it takes {now.slowness:.2g} times its usual time for the same work, "
            f"for at least {SLOW_STEPS} steps in a row"
        )
    return (
        f"worker {worker} is less slow: it takes {now.slowness:.2g} times its usual time instead of {was.slowness:.2g}"
    )


# The costs of moves that a run has measured: the time to send a replica, and the pause of a hand-over.
#
#     heal       of a new shadow, from the first word of its owner to the whole replica
#     pause      the first step with other owners, less the median of the next five
#
# Rules: as long as nothing was measured, the first guesses count. A hand-over behind which another epoch comes too soon
# has no pause. Of several measured values the median counts, so one step in which the machine was busy changes little.

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


LEAST_STEPS = 10  # of a stage, before its times are known
EDGE_STEPS = 8  # of an edge, before its time is known: the median of the last ones
_LAST_STEPS = 32

Times = tuple[float, float]  # the seconds of all forwards of a stage in a step, and of all backwards


class WorkerTimes(NamedTuple):
    """The times of the last steps. Mappings are never modified."""

    at: tuple[int, int] = (0, -1)  # the epoch and the open step
    told: VoteChain = None  # the votes of owners in them
    counted: int = 0  # steps
    stages: Mapping[int, tuple[Times, ...]] = {}  # of the last steps on workers that were not slow
    sizes: Mapping[int, StageBytes] = {}
    edges: Mapping[int, tuple[float, ...]] = {}  # seconds of a transfer from each stage to the next, of the last steps
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
        times = times._replace(at=(vote.epoch, vote.step), told=None)
    slots = tuple(each for each in vote.slots if each.took_ns)
    sizes = {each.stage: StageBytes(*each.sizes) for each in slots if each.sizes}
    times = times._replace(told=(times.told, worker, slots), costs=after_vote(times.costs, vote))
    return times._replace(sizes={**times.sizes, **sizes}) if sizes else times, changes


def with_owners(times: WorkerTimes, owners: tuple[int, ...], *, is_planned: bool) -> WorkerTimes:
    """Returns the times when an epoch begins; with other owners, transfers go between other workers."""
    edges = times.edges if times.costs.owners in ((), owners) else {}
    return times._replace(costs=after_epoch(times.costs, owners, is_planned=is_planned), edges=edges)


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
    """Returns the facts for an assignment, in units until all stages have times; members share the `free_bytes`."""
    grid, stages = job.grid, range(job.grid.stages)
    seconds = [pair for stage in stages if (pair := usual(times, stage)) is not None]
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
        replica_bytes=tuple(replica_bytes(times.sizes[stage]) for stage in stages) if owned else (),
        owned_bytes=owned,
        memory=memory,
        host_of=hosts,
        bytes_per_s=bytes_per_s(times.costs, times.sizes),
        pause_s=pause_s(times.costs),
    )


def _closed(times: WorkerTimes) -> tuple[WorkerTimes, tuple[PaceChange, ...]]:
    told: dict[int, tuple[SlotVote, ...]] = {}
    for worker, votes in in_order(times.told):
        told[worker] = (*told.get(worker, ()), *votes)
    whole = {worker: votes for worker, votes in told.items() if votes and all(any(e.took_ns) for e in votes)}
    if not whole:
        return times, ()
    if times.counted == 0:
        return times._replace(counted=1), ()
    computed = {worker: compute for worker, votes in whole.items() if (compute := _computed(times, votes)) is not None}
    paces, changes = after_step(times.paces, times.at[1], computed)
    stages = dict(times.stages)
    for worker, votes in sorted(whole.items()):
        if worker in paces and paces[worker].slowness > 1:
            continue  # else the usual times would follow the slow worker, and it would be well, or slow, for ever
        for vote in votes:
            took = vote.took_ns[0] / _NS, vote.took_ns[1] / _NS
            stages[vote.stage] = (*stages.get(vote.stage, ()), took)[-_LAST_STEPS:]
    edges = _with_edges(times.edges, [vote for votes in whole.values() for vote in votes if vote.passed_ns])
    return times._replace(counted=times.counted + 1, stages=stages, edges=edges, paces=paces), changes


def _with_edges(known: Mapping[int, tuple[float, ...]], votes: Collection[SlotVote]) -> Mapping[int, tuple[float, ...]]:
    """Returns the times of transfers with those of a step.

    The least of all microbatches counts: its receiver has waited. The mean of both ways needs no common clock. Of
    several pipelines the slowest counts.
    """
    passed = {(vote.pipeline, vote.stage): vote.passed_ns for vote in votes}
    new: dict[int, float] = {}
    for (pipeline, stage), (sent, _, _, back) in passed.items():
        _, came, returned, _ = passed.get((pipeline, stage + 1), ((), (), (), ()))
        if sent and len(sent) == len(came) == len(returned) == len(back):
            ways = (min(map(sub, came, sent)), min(map(sub, back, returned)))
            new[stage] = max(new.get(stage, 0.0), sum(ways) / 2 / _NS)
    return {**known, **{each: (*known.get(each, ()), one)[-EDGE_STEPS:] for each, one in new.items()}} if new else known


def _computed(times: WorkerTimes, votes: Iterable[SlotVote]) -> Compute | None:
    """Returns the seconds of a worker, and the usual ones of the same work; None if these are unknown."""
    seconds = work = 0.0
    for vote in votes:
        pair = usual(times, vote.stage)
        if pair is None:
            return None
        seconds += sum(vote.took_ns) / _NS
        work += sum(pair)
    return Compute(seconds, work) if work > 0 else None


def _lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]
