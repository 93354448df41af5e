"""The inputs of the coordinator, each with its time, and its outputs, which are carried out in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from engine.core.history.run_records import CommitRecord, StampedRecord
from engine.core.message_kinds import ToWorker
from engine.core.messages import FailedMessage, RaisedMessage, RefusedMessage
from engine.core.monitors import NO_MONITORS, Monitors
from engine.core.protocol.events import (
    HostWord,
    JobRestart,
    LeaseExpired,
    MemoryShortage,
    Notice,
    RecoveryPhase,
    Sight,
    Takeover,
    WantedOwners,
    WantedSchedule,
    WorkerWord,
)

# Inputs of the coordinator, each with the time at which it came.
#
# Rules: some events of the membership protocol are inputs as they are. `Takeover` is the first input of a coordinator
# that goes on with the state of another.


class Place(NamedTuple):
    """The last action that a worker has begun; `is_struck`: a fault was injected into the worker."""

    step: int
    action: str
    is_struck: bool = False


class ProcessExit(NamedTuple):
    """The process of a worker has ended at a place, if that is known; a negative `code` is the number of a signal."""

    now_ns: int
    worker: int
    code: int
    at: Place | None = None


class ClockTick(NamedTuple):
    """Time has passed; `places` and `sights` are those of the workers, as far as they are known.

    The hosts of `unseen` workers have been silent for a while; `words` are from other hosts' agents, with all
    heartbeats, and `round_trip_ns` is the worst one to them lately.
    """

    now_ns: int
    places: Mapping[int, Place] = {}
    sights: Mapping[int, Sight] = {}
    unseen: tuple[int, ...] = ()
    words: Mapping[int, HostWord] = {}
    round_trip_ns: int = 0


class RunStopping(NamedTuple):
    """The run is ending: from now on nothing is decided. With `keeps`, the last committed step is kept."""

    now_ns: int
    keeps: bool = False


class JobResumption(NamedTuple):
    """All workers of a job that could not go on have ended; others start with this ownership after a committed step."""

    now_ns: int
    committed: int
    owners: tuple[int, ...]
    shadows: tuple[tuple[int, ...], ...]
    monitors: Monitors = NO_MONITORS  # as of that step


CoordinatorInput = (
    WorkerWord[Any]
    | ProcessExit
    | ClockTick
    | RunStopping
    | Notice
    | WantedOwners
    | WantedSchedule
    | MemoryShortage
    | LeaseExpired
    | Takeover
    | JobRestart
    | JobResumption
)


# Outputs of the coordinator: messages and orders that may travel to another process, and are carried out in order.
#
# Rule: the state is written to the store before an output is carried out.


class Tell(NamedTuple):
    """Sends a message to these workers, in this order; a worker that has ended is left out."""

    workers: tuple[int, ...]
    message: ToWorker


class Teach(NamedTuple):
    """Tells newcomers, also those that come later, a message that all others have got."""

    message: ToWorker


class KeepStep(NamedTuple):
    """Awaits the parts of the checkpoint of a step, which the workers are ordered to write next."""

    step: int
    epoch: int


class OrphanParts(NamedTuple):
    """Marks the awaited parts as orphans: the next epoch may leave out the workers that had to write them."""


class Write(NamedTuple):
    """Writes a record; if it follows a `Tell`, its time is the one before the message was sent."""

    record: StampedRecord


class Kill(NamedTuple):
    """Ends the process of a worker that is out."""

    worker: int


class Note(NamedTuple):
    """Shows a line to the user."""

    text: str


class PhaseReached(NamedTuple):
    """A recovery has reached a phase: the faults that wait for it strike."""

    phase: RecoveryPhase
    epoch: int


class Arm(NamedTuple):
    """The plan of an epoch is about to run: the faults that wait for its catch-up point are armed."""


class Restart(NamedTuple):
    """Ends all workers and starts them again, without the end of the run; `JobRestart` is the answer."""


class Stop(NamedTuple):
    """Ends the run, which cannot go on; `stage` is the one whose code of the user is the cause."""

    text: str
    exit_code: int | None = None
    stage: int | None = None


class Fail(NamedTuple):
    """Ends the run with the error in the last message of a worker; `has_commit`: training would be lost."""

    worker: int
    last: RefusedMessage | FailedMessage | RaisedMessage
    has_commit: bool


class Release(NamedTuple):
    """Lets the workers end: every step is committed. `cut_short` says why the work after the last one is incomplete."""

    cut_short: str


CoordinatorOutput = (
    Tell | Teach | KeepStep | OrphanParts | Write | Kill | Note | PhaseReached | Arm | Restart | Stop | Fail | Release
)


def recorded_first(outputs: Iterable[CoordinatorOutput]) -> list[CoordinatorOutput]:
    """Returns outputs with the record of a commit in front: a worker's vote then proves that its host knows it."""
    return sorted(
        outputs, key=lambda output: not (isinstance(output, Write) and isinstance(output.record, CommitRecord))
    )
