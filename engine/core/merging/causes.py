"""The causes of records of a run: an order never stands before its cause.

    exit of a worker ----> epoch that puts it out ----> ends of phases in the epoch ----> plan ----> go
    fault ----> its confirmation            commit ----> validation of its step

Rules: clocks are known within bounds, so a cause may seem to be later than its effect, by `slack_ns` at most; a record
that is later still is no cause, but one of the same number after a restart. In one file the order is known.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from engine.core.exclusion import Cause
from engine.core.history.process_records import ExitRecord
from engine.core.history.record import StampedRecord
from engine.core.history.run_records import (
    CommitRecord,
    ConfirmedRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    HeirsRecord,
    MarkRecord,
    MovedRecord,
    PlanRecord,
    ValidationRecord,
)


class Causes:
    """The causes that are still to come, among the records of some files."""

    def __init__(self, files: Sequence[Iterable[StampedRecord]], slack_ns: int):
        self._slack_ns = slack_ns
        self._to_come: dict[Hashable, list[tuple[int, int]]] = {}  # of each cause: time and file, in the file's order
        self._told_ns: dict[Hashable, int] = {}
        for number, file in enumerate(files):
            for record in file:
                for cause in _gives(record):
                    self._to_come.setdefault(cause, []).append((record.at_ns, number))

    def waits(self, record: StampedRecord, file: int) -> bool:
        """Returns whether a cause of a record of a file is still to come in another one."""
        latest_ns = record.at_ns + self._slack_ns
        return any(
            number != file and at_ns <= latest_ns
            for each in _needs(record)
            for at_ns, number in self._to_come.get(each, ())
        )

    def told(self, record: StampedRecord, file: int) -> int:
        """Takes a record as the next one; returns the time of its latest cause if that seems to be later, or 0."""
        latest_ns = record.at_ns + self._slack_ns
        since_ns = max((at for each in _needs(record) if (at := self._told_ns.get(each, 0)) <= latest_ns), default=0)
        for cause in _gives(record):
            self._to_come[cause].remove((record.at_ns, file))
            self._told_ns[cause] = max(record.at_ns, since_ns, self._told_ns.get(cause, 0))
        return since_ns


def _gives(record: StampedRecord) -> Iterator[Hashable]:
    """Yields that which a record is a cause of."""
    match record:
        case ExitRecord(of=of, expected=False):
            yield "exit", of
        case EpochRecord(epoch=epoch):
            yield "epoch", epoch
        case MarkRecord(epoch=epoch, phase=phase):
            yield phase, epoch
        case PlanRecord(epoch=epoch):
            yield "planned", epoch
        case CommitRecord(step=step):
            yield "commit", step
        case FaultRecord(fault=fault):
            yield "fault", fault


def _needs(record: StampedRecord) -> Iterator[Hashable]:
    """Yields the causes of a record."""
    match record:
        case EpochRecord(verdict=verdict):
            for each in verdict:
                if each.cause in (Cause.DEATH, Cause.RAISED):
                    yield "exit", each.worker
        case MarkRecord(epoch=epoch, phase=phase):
            yield "epoch", epoch
            if phase == "plan":
                yield "planned", epoch
        case HeirsRecord(epoch=epoch) | MovedRecord(epoch=epoch):
            yield "epoch", epoch
        case PlanRecord(epoch=epoch):
            yield "epoch", epoch
            yield "inventory", epoch
        case GoRecord(epoch=epoch):
            yield "planned", epoch
        case ValidationRecord(step=step):
            yield "commit", step
        case ConfirmedRecord(fault=fault):
            yield "fault", fault
