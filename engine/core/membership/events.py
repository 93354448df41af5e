"""What happens to a job's membership: the events of the protocol, each with the time at which the coordinator saw it.

Rules: `now_ns` is nanoseconds on the coordinator's monotonic clock. What a worker says itself is `Spoken`: nobody
listens to a worker that is out. An `Answer` counts in its own epoch only. Everything else is seen by others: agents,
the ballot, the clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened."""

    now_ns: int


@dataclass(frozen=True, slots=True)
class Spoken(Event):
    """A worker's own word."""

    worker: int


@dataclass(frozen=True, slots=True)
class Answer(Spoken):
    """A worker's word in an epoch; in another epoch it means nothing."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Joined(Spoken):
    """A worker is ready; `node` is the host whose lease covers it."""

    node: str


@dataclass(frozen=True, slots=True)
class Heartbeat(Spoken):
    """A sign of life: `index` counts the actions begun in `step`; `inside` the last of them, or waiting after it."""

    epoch: int
    step: int
    index: int
    inside: bool


@dataclass(frozen=True, slots=True)
class Suspicion(Answer):
    """A transfer failed at `worker`; `peer` is whom it was talking to, which says little about who died."""

    peer: int | None = None


@dataclass(frozen=True, slots=True)
class ExitSeen(Event):
    """An agent saw the process of `worker` end; a negative `code` is the number of the signal."""

    worker: int
    code: int


@dataclass(frozen=True, slots=True)
class LeaseExpired(Event):
    """The agent of a node has not renewed its lease: the whole node is gone."""

    node: str


@dataclass(frozen=True, slots=True)
class Inventory(Answer):
    """What a worker holds, as text or as the digest of a text kept elsewhere; with it the worker freezes.

    `whole` are the slots of which it has a whole replica, that of a shadow which is being healed among them.
    """

    holds: str
    whole: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanAcknowledged(Answer):
    """A worker has made the plan: its digest, and the stages that it cannot bring back from the inventories."""

    digest: str
    lost_stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepCommitted(Event):
    """Every owner and shadow holds what `step` needs: the ballot is full.

    `shadows` are the whole replicas of each slot besides the owner's, in the order in which they would take over;
    empty where they have not changed. With `waits` nobody hands over or leaves yet: there is time for another step,
    in which that can be prepared.
    """

    epoch: int
    step: int
    shadows: tuple[tuple[int, ...], ...] = ()
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """`worker` is going to leave in `grace_ns`; without a worker: the whole job is to stop after the running step."""

    worker: int | None
    grace_ns: int


@dataclass(frozen=True, slots=True)
class Done(Answer):
    """A worker has done everything after the last step, and waits to be let go."""


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed; comes several times in the shortest of the deadlines."""


EVENTS: tuple[type[Event], ...] = (
    Joined,
    Heartbeat,
    Suspicion,
    ExitSeen,
    LeaseExpired,
    Inventory,
    PlanAcknowledged,
    StepCommitted,
    Notice,
    Done,
    Tick,
)
