"""Events of the membership protocol, each with the time at which the coordinator received it.

Rules: `now_ns` is nanoseconds on the coordinator's monotonic clock. What a worker says is one kind of event for each
kind of message; an `Answer` counts only in its own epoch. The other events come from agents, the ballot and the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, Literal, NamedTuple, TypeVar

from engine.core.message_kinds import Message
from engine.core.messages import FinishedMessage, HeartbeatMessage, SuspicionMessage
from engine.core.program.inventory import InventoryMessage, PlannedMessage

RecoveryPhase = Literal["detect", "agree", "fence", "regroup", "inventory", "plan", "replay", "merged", "heal"]

# The evidence on a worker from outside: the kernel's accounts of its process, and its line of the board.
#
# Rules: evidence needs no answer of the worker, so it also covers a process in which one thread holds Python's lock. A
# worker loads data in its main thread, or ahead in another one; neither is a reason to evict it. Time without looks is
# no evidence.


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
    """What another host's agent reports of a worker: the age of its last message there, and its latest heartbeat."""

    age_ns: int
    heartbeat: HeartbeatMessage | None = None


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


Answer = InventoryMessage | PlannedMessage | SuspicionMessage | FinishedMessage
Said = TypeVar("Said", bound=Message)


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    now_ns: int


@dataclass(frozen=True, slots=True)
class WorkerWord(Event, Generic[Said]):
    """A message of a worker on the host `node`, whose lease covers the worker; it is ignored if the worker is out."""

    worker: int
    message: Said
    node: str = ""


@dataclass(frozen=True, slots=True)
class ExitSeen(Event):
    """The process of `worker` has ended, by a signal if `code` is negative; `raised` follows the words "worker N"."""

    worker: int
    code: int
    raised: str = ""


@dataclass(frozen=True, slots=True)
class LeaseExpired(Event):
    """The agent of a node has not renewed its lease: the whole node counts as lost."""

    node: str


@dataclass(frozen=True, slots=True)
class StepCommitted(Event):
    """The ballot is complete: every owner and shadow has voted for `step`.

    `shadows` of each slot have whole replicas, in the order of succession; empty if unchanged. With `waits`, hand-overs
    and departures wait for the next commit, to prepare an epoch. The waiting workers in `joins` become members; the
    `patient` ones keep their slots until the wanted owners hold whole replicas.
    """

    epoch: int
    step: int
    shadows: tuple[tuple[int, ...], ...] = ()
    waits: bool = False
    joins: tuple[int, ...] = ()
    patient: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """`worker` will leave within `grace_ns`; with None, the whole job stops after the running step."""

    worker: int | None
    grace_ns: int


@dataclass(frozen=True, slots=True)
class EarlyStop(Event):
    """Validations no longer improve: no step follows `last_step`."""

    last_step: int


@dataclass(frozen=True, slots=True)
class HandOver(Event):
    """`worker` has given notice, and its time does not suffice for the step boundary: it hands over now."""

    worker: int


@dataclass(frozen=True, slots=True)
class Departure(Event):
    """`worker` has given notice and owns no slot, and its time is nearly over."""

    worker: int


@dataclass(frozen=True, slots=True)
class WantedOwners(Event):
    """From now on these owners of all slots are wanted, because of `why`, in words; empty: the present ones."""

    owners: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class WantedSchedule(Event):
    """From the next boundary on this schedule is wanted, with these `owners` if slots move; empty: the job's own."""

    schedule: str
    why: str
    owners: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryShortage(Event):
    """From now on these workers, which are no members, lack memory for one slot and must wait; others may join."""

    workers: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed; comes several times within the shortest deadline. Agents have looked at some workers.

    The hosts of `unseen` workers have been silent for a while. `words` are those of other hosts, `round_trip_ns` is the
    worst one to them lately.
    """

    sights: Mapping[int, Sight] = field(default_factory=dict)
    unseen: tuple[int, ...] = ()
    words: Mapping[int, HostWord] = field(default_factory=dict)
    round_trip_ns: int = 0


@dataclass(frozen=True, slots=True)
class Takeover(Event):
    """A new coordinator continues from the stored state; its predecessor's host is `lost`, or empty: its process."""

    lost: str = ""


@dataclass(frozen=True, slots=True)
class JobRestart(Event):
    """All workers have ended and were started again; `shadows` are the new ones of each slot, empty if unchanged."""

    shadows: tuple[tuple[int, ...], ...] = ()
