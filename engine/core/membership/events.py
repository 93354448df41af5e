"""Events of the membership protocol, each with the time at which the coordinator received it.

Rules: `now_ns` is nanoseconds on the coordinator's monotonic clock. What a worker says is one kind of event for each
kind of message; an `Answer` counts only in its own epoch. The other events come from agents, the ballot and the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from engine.core.membership.evidence import HostWord, Sight
from engine.core.message_codec import Message
from engine.core.messages import FinishedMessage, SuspicionMessage
from engine.core.recovery.plan_messages import InventoryMessage, PlannedMessage

Answer = InventoryMessage | PlannedMessage | SuspicionMessage | FinishedMessage
Said = TypeVar("Said", bound=Message)


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    now_ns: int


@dataclass(frozen=True, slots=True)
class Heard(Event, Generic[Said]):
    """A message of a worker on the host `node`, whose lease covers the worker; it is ignored if the worker is out."""

    worker: int
    message: Said
    node: str = ""


@dataclass(frozen=True, slots=True)
class ExitSeen(Event):
    """An agent saw the end of the process of `worker`; a negative `code` is the number of a signal.

    `raised` is the exception that ended it, as words that follow "worker N", or empty.
    """

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

    `shadows` are the shadows of each slot with a whole replica, in the order of succession; empty if unchanged. With
    `waits`, hand-overs and departures wait for the next commit, so that the next epoch can be prepared meanwhile. With
    this commit the waiting workers in `joins` become members: their group is formed. The `patient` workers leave, and
    have time to keep their slots until the wanted owners hold whole replicas.
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
class HandOver(Event):
    """`worker` has given notice, and its time does not suffice for the step boundary: it hands over now."""

    worker: int


@dataclass(frozen=True, slots=True)
class Departure(Event):
    """`worker` has given notice and owns no slot, and its time is nearly over."""

    worker: int


@dataclass(frozen=True, slots=True)
class Wanted(Event):
    """From now on these owners of all slots are wanted, because of `why`, in words; empty: the present ones."""

    owners: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Cramped(Event):
    """From now on the memory of these workers, which are no members, does not suffice for one slot: they must wait.

    `workers` has the reason of each, in words that follow "worker N"; any other worker may join.
    """

    workers: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed; comes several times within the shortest deadline. Agents have looked at some workers.

    From the hosts of the `unseen` workers no sign of life has come for a while. `words` are what other hosts tell.
    """

    sights: Mapping[int, Sight] = field(default_factory=dict)
    unseen: tuple[int, ...] = ()
    words: Mapping[int, HostWord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TakenOver(Event):
    """A new coordinator goes on from the written state; the words that only its predecessor knew are lost.

    Its predecessor may be lost with its host, `lost`, and the workers there; empty if only the process has ended.
    """

    lost: str = ""


@dataclass(frozen=True, slots=True)
class Restarted(Event):
    """All workers of the job have ended and were started again; no message of the ended ones comes any more.

    `shadows` are the new shadows of each slot, as the workers may stand on other hosts now; empty if unchanged.
    """

    shadows: tuple[tuple[int, ...], ...] = ()
