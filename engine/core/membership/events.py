"""Events of the membership protocol, each with the time at which the coordinator received it.

Rules: `now_ns` is nanoseconds on the coordinator's monotonic clock. A `Spoken` event is a message of a worker; it is
ignored if the worker is out. An `Answer` counts only in its own epoch. The other events come from agents, the ballot
and the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.core.membership.evidence import Sight
from engine.core.membership.standstill import Report


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    now_ns: int


@dataclass(frozen=True, slots=True)
class Spoken(Event):
    """A message of a worker."""

    worker: int


@dataclass(frozen=True, slots=True)
class Answer(Spoken):
    """A message of a worker that counts only in `epoch`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Joined(Spoken):
    """A worker is ready; `node` is the host whose lease covers it."""

    node: str


@dataclass(frozen=True, slots=True)
class Heartbeat(Spoken):
    """A heartbeat: `index` is the number of actions begun in `step`; `inside` the last of them, or waiting after it."""

    epoch: int
    step: int
    index: int
    inside: bool
    report: Report | None = None  # of a worker that waits without news


@dataclass(frozen=True, slots=True)
class Suspicion(Answer):
    """A transfer between `worker` and `peer` failed at `worker`; the cause may be a third worker."""

    peer: int | None = None


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
class InventoryReceived(Answer):
    """The inventory of a worker, as text or as the digest of a text stored elsewhere; the worker is frozen with it.

    `whole` are the slots of which it has a whole replica, including shadows that were healed in the open step.
    """

    holds: str
    whole: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanAcknowledged(Answer):
    """A worker has made the plan: its digest, and the stages that the inventories cannot restore."""

    digest: str
    lost_stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepCommitted(Event):
    """The ballot is complete: every owner and shadow has voted for `step`.

    `shadows` are the shadows of each slot with a whole replica, in the order of succession; empty if unchanged. With
    `waits`, hand-overs and departures wait for the next commit, so that the next epoch can be prepared meanwhile.
    """

    epoch: int
    step: int
    shadows: tuple[tuple[int, ...], ...] = ()
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """`worker` will leave within `grace_ns`; with None, the whole job stops after the running step."""

    worker: int | None
    grace_ns: int


@dataclass(frozen=True, slots=True)
class Done(Answer):
    """A worker has finished all work after the last step and waits for the order to exit."""


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed; comes several times within the shortest deadline. Agents have looked at some workers."""

    sights: Mapping[int, Sight] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TakenOver(Event):
    """A new coordinator goes on from the written state; the words that only its predecessor knew are lost."""


@dataclass(frozen=True, slots=True)
class Restarted(Event):
    """All workers of the job have ended and were started again; no message of the ended ones comes any more."""


EVENTS: tuple[type[Event], ...] = (
    Joined,
    Heartbeat,
    Suspicion,
    ExitSeen,
    LeaseExpired,
    InventoryReceived,
    PlanAcknowledged,
    StepCommitted,
    Notice,
    Done,
    Tick,
    TakenOver,
    Restarted,
)
