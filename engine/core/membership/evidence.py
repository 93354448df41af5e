"""The evidence on a worker from outside: the kernel's accounts of its process, and its line of the board.

Rules: evidence needs no answer of the worker, so it also tells of a process in which one thread holds Python's lock. A
worker loads data in its main thread, or ahead in another one; neither is a reason to put it out. Time without
looks is no evidence: each process that looks at workers leaves it out.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

_STOPPED = ("T", "t")
_LATE_NS = 500_000_000  # looks come four times a second
_SLEPT_NS = 1_000_000_000
_LEAST_PART = 5  # a fifth of a core: threads that only wait for Python's lock look for it 200 times a second


class Loading(IntEnum):
    """The thread of a worker that loads data."""

    NONE = 0
    AHEAD = 1  # another than the main thread
    MAIN = 2  # the main thread, or another one for which it waits


class Sight(NamedTuple):
    """One look at the process of a worker.

    `number` counts the actions begun in `step`; the worker is `inside` the last of them for `inside_ns`, without
    the time in which it loaded data. `slowest_ns` is its slowest action in this step and the one before, 0 if none.
    """

    epoch: int
    step: int
    number: int
    inside: bool
    inside_ns: int
    slowest_ns: int
    loading: Loading
    state: str  # of the main thread, as in `/proc/PID/stat`
    thread_ns: int  # for which the main thread has run, or waited for a core, since its start
    process_ns: int  # for which all threads have run


class HostWord(NamedTuple):
    """What the agent of another host tells of a worker: how long ago it spoke, as that agent saw it.

    `heartbeat` is the last one that was not told yet, as it travels; empty for none.
    """

    age_ns: int
    heartbeat: str = ""


class Evidence(NamedTuple):
    """The last look at a process, with the times at which it was seen to have run since the look before."""

    sight: Sight
    ran_ns: int  # the main thread ran, or waited for a core
    worked_ns: int  # the threads together had run for a part of the time since then
    worked_process_ns: int  # their time at that look
    stopped_ns: int = 0  # a signal had stopped the process

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        return self.sight.state in _STOPPED


def unwatched_ns(looked_ns: int, now_ns: int) -> int:
    """Returns by how many nanoseconds all times before a look move on, as the one before is long ago.

    A late look counts for as long as a usual one. After a longer gap the looker slept: all deadlines begin again.
    """
    gap_ns = now_ns - looked_ns
    if gap_ns > _SLEPT_NS:
        return now_ns
    return gap_ns - _LATE_NS // 2 if gap_ns > _LATE_NS else 0


def after(was: Evidence | None, sight: Sight, now_ns: int) -> Evidence:
    """Returns the evidence after one more look."""
    if was is None:
        return Evidence(sight, now_ns, now_ns, sight.process_ns)
    ran = sight.thread_ns != was.sight.thread_ns or sight.state == "R"
    worked = (sight.process_ns - was.worked_process_ns) * _LEAST_PART >= now_ns - was.worked_ns
    return Evidence(
        sight,
        now_ns if ran else was.ran_ns,
        now_ns if worked else was.worked_ns,
        sight.process_ns if worked else was.worked_process_ns,
        now_ns if sight.state in _STOPPED else was.stopped_ns,
    )
