"""Outputs of the coordinator: messages and orders that may travel to another process, and are carried out in order.

Rule: the state is written to the store before an output is carried out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.core.faults.fault import RecoveryPhase
from engine.core.history.record import StampedRecord
from engine.core.history.run_records import CommitRecord
from engine.core.message_codec import ToWorker
from engine.core.messages import FailedMessage, RaisedMessage, RefusedMessage


class Tell(NamedTuple):
    """Sends a message to these workers, in this order; a worker that has ended is left out."""

    workers: tuple[int, ...]
    message: ToWorker


class Write(NamedTuple):
    """Writes a record; if it follows a `Tell`, its time is the one before the message was sent."""

    record: StampedRecord


class Kill(NamedTuple):
    """Ends the process of a worker that is out."""

    worker: int


class Note(NamedTuple):
    """Shows a line to the user."""

    text: str


class Reached(NamedTuple):
    """A recovery has reached a phase: the faults that wait for it strike."""

    phase: RecoveryPhase
    epoch: int


class Arm(NamedTuple):
    """The plan of an epoch is about to run: the faults that wait for its catch-up point are armed."""


class Restart(NamedTuple):
    """Ends all workers and starts them again, without the end of the run; `Restarted` is the answer."""


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


CoordinatorOutput = Tell | Write | Kill | Note | Reached | Arm | Restart | Stop | Fail | Release


def recorded_first(outputs: Iterable[CoordinatorOutput]) -> list[CoordinatorOutput]:
    """Returns outputs with the record of a commit before all others: each host hears of a commit before its workers do.

    So a vote of a host's worker proves that the host has heard of all steps before, and its results can go on.
    """
    return sorted(outputs, key=lambda each: not (isinstance(each, Write) and isinstance(each.record, CommitRecord)))
