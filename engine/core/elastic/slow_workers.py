"""Slow workers: the pace of each worker against its own past, and the decision which of them are slow.

    pace     seconds of its compute actions in a step, for each unit of work in them; waiting does not count
    usual    median of its past paces
    factor   pace / usual, over that of the machine: three quarters of the workers are at least that slow

A worker is slow after five steps in a row with a factor of 1.5 or more, if nine tenths of its past were faster than
each of them. Three such steps later it is surely slow: its speed is 1 / factor. Any other step before that ends the
doubt. It then stays slow until most of its last steps were well, so a speed that flaps does not change the decision
with every turn. Rules: no worker is given up for its pace. A busy machine slows all workers, and makes none of them
slow. A slow worker that has computed nothing for a thousand steps is tried again, with a part of the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

SLOW_FACTOR = 1.5
SLOW_STEPS = 5  # in a row
SURE_STEPS = 3  # after these
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
    """The paces of one worker up to its last steps, these last paces and factors, and the factor of a slow worker."""

    past: tuple[float, ...] = ()
    last: tuple[float, ...] = ()  # at most `SLOW_STEPS`, which become the past if the worker is not slow
    factors: tuple[float, ...] = ()  # at most `WELL_STEPS`
    slowness: float = 1.0
    is_sure: bool = True
    idle: int = 0  # steps without work, of a slow worker


Paces = Mapping[int, Pace]


class PaceChange(NamedTuple):
    """A worker that has become slow, slower, less slow or well (1), with the figures in words."""

    step: int
    worker: int
    slowness: float
    why: str


def after_step(paces: Paces, step: int, computed: Mapping[int, Compute]) -> tuple[Paces, tuple[PaceChange, ...]]:
    """Returns the paces after a step without a failure, and the changes, by worker.

    A worker that computed nothing keeps its paces, and is tried again at last if it is slow. `members_only` drops those
    of workers that are no members any more.
    """
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
        new[worker] = (
            _judged(was, pace / machine, factors[worker] / machine) if worker in factors else _grown(was, pace)
        )
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
    """Returns the speed of each worker that is surely slow, below 1; all others have their usual one."""
    return {worker: 1 / pace.slowness for worker, pace in sorted(paces.items()) if pace.slowness > 1 and pace.is_sure}


def slow_workers(paces: Paces) -> tuple[int, ...]:
    """Returns the slow workers, also those that are not surely slow."""
    return tuple(worker for worker, pace in sorted(paces.items()) if pace.slowness > 1)


def _grown(was: Pace, pace: float) -> Pace:
    last = (*was.last, pace)
    return was._replace(past=(*was.past, *last[:-SLOW_STEPS])[-_PAST_STEPS:], last=last[-SLOW_STEPS:])


def _judged(was: Pace, pace: float, factor: float) -> Pace:
    usual = median(was.past)
    least = max(SLOW_FACTOR * usual, sorted(was.past)[int(_FASTER * len(was.past))])
    if was.slowness == 1:
        grown = _grown(was, pace)
        is_slow = len(grown.last) == SLOW_STEPS and min(grown.last) >= least
        return Pace(was.past, slowness=median(grown.last) / usual, is_sure=False) if is_slow else grown
    factors = (*was.factors, factor)[-WELL_STEPS:]
    if not was.is_sure:
        return was._replace(factors=factors, is_sure=len(factors) == SURE_STEPS) if pace >= least else Pace(was.past)
    return _of_slow(was._replace(factors=factors))


def _of_slow(was: Pace) -> Pace:
    """Returns the pace of a slow worker: slower still, less slow, or well."""
    factors = was.factors
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
    if now.slowness == 1 and not was.is_sure:
        return f"worker {worker} is not slow: it was for a moment"
    if now.slowness == 1:
        return f"worker {worker} is as fast as usual again: most of its last {WELL_STEPS} steps took their usual time"
    if now.slowness > was.slowness:
        return (
            f"worker {worker} is slow: it takes {now.slowness:.2g} times its usual time for the same work, "
            f"for {SLOW_STEPS} steps in a row"
        )
    return (
        f"worker {worker} is less slow: it takes {now.slowness:.2g} times its usual time instead of {was.slowness:.2g}"
    )
