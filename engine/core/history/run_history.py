"""The state of a run by its records: the job, the owners of its slots, the last commit, the faults and the end.

It takes records one by one in the order of the file, so that it can follow a file that still grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from engine.core.config.job import Job
from engine.core.history.process_records import EndedRecord, FailedRecord, StartedRecord, TrainingEndedRecord
from engine.core.history.record import Record, StampedRecord
from engine.core.history.run_records import (
    ActionRecord,
    CommitRecord,
    ConfirmedRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    HeirsRecord,
    JobRecord,
)
from engine.core.history.verdict_records import CheckRecord
from engine.core.ownership import Slot, by_slot

R = TypeVar("R", bound=Record)


@dataclass(slots=True)
class RunHistory:
    """The history of a run; to read from the middle, give the job, the owners at that time, and `is_training`."""

    job: Job = field(default_factory=lambda: Job(steps=0))  # until the first record
    is_training: bool = False
    owners: dict[Slot, int] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    epochs: list[EpochRecord] = field(default_factory=list)  # with the owners of a later `HeirsRecord`
    last_action: dict[int, ActionRecord] = field(default_factory=dict)  # of each worker
    _of: dict[type[Record], list[Any]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Adds the next record."""
        self.records.append(record)
        self._of.setdefault(type(record), []).append(record)
        match record:
            case ActionRecord():
                self.last_action[record.worker] = record
            case JobRecord():
                self.job = record.job
            case StartedRecord():
                self.owners |= dict.fromkeys(record.slots, record.of)
            case EpochRecord():
                self.epochs.append(record)
                self.owners = by_slot(record.owners, self.job.stages)
            case HeirsRecord() if self.epochs:
                self.epochs[-1] = replace(self.epochs[-1], owners=record.owners, shadows=record.shadows)
                self.owners = by_slot(record.owners, self.job.stages)
            case GoRecord():
                self.is_training = True

    def of(self, kind: type[R]) -> list[R]:
        """Returns the records of one kind."""
        return self._of.get(kind, [])

    def first(self, kind: type[R]) -> R | None:
        """Returns the first record of a kind, or None."""
        return next(iter(self.of(kind)), None)

    def in_epochs(self, *kinds: type[R]) -> Iterator[tuple[int, R]]:
        """Yields (epoch, record) for the records of some kinds; the epoch is 0 before the first."""
        epoch = 0
        for record in self.records:
            epoch = record.epoch if isinstance(record, EpochRecord) else epoch
            if isinstance(record, kinds):
                yield epoch, record

    @property
    def begin_ns(self) -> int:
        """The time at which training began, else the time of the first record, else 0."""
        stamped = (each for each in self.records if isinstance(each, StampedRecord))
        first = self.first(GoRecord) or next(stamped, None)
        return first.at_ns if first else 0

    @property
    def committed(self) -> int:
        """The last committed step, -1 before the first."""
        commits = self.of(CommitRecord)
        return commits[-1].step if commits else -1

    @property
    def struck(self) -> set[str]:
        """The ids of the faults that have struck."""
        return {each.fault for each in self.of(FaultRecord)}

    @property
    def confirmed_ns(self) -> dict[str, int]:
        """The faults whose effect was seen on all their victims, with the time."""
        return {each.fault: each.at_ns for each in self.of(ConfirmedRecord)}

    @property
    def training_ended(self) -> TrainingEndedRecord | None:
        """The end of training; None while it goes on, or if its launcher died without it."""
        return self.first(TrainingEndedRecord)

    @property
    def ended(self) -> EndedRecord | None:
        """The end of the command that made the run; None before its verdict, or if it died without one."""
        return self.first(EndedRecord)

    @property
    def findings(self) -> list[CheckRecord]:
        """The checks that did not pass, failed ones first; none if the run failed: then its error is the finding."""
        found = [each for each in self.of(CheckRecord) if each.result in ("failed", "invalid")]
        if self.error and any(each.name == "outcome" for each in found):
            return []
        return sorted(found, key=lambda each: each.result)

    @property
    def is_injectable(self) -> bool:
        """Whether the run takes faults from requests in its folder."""
        first = self.first(JobRecord)
        return first is None or first.injectable

    @property
    def notice(self) -> str:
        """The wrong numbers that the run noticed before it ended, as a scenario names them; else an empty text."""
        failed = self.first(FailedRecord)
        return failed.notice if failed else ""

    @property
    def error(self) -> str:
        """The error that ended the run, or an empty text."""
        failed = self.first(FailedRecord)
        return failed.error if failed else ""


def history_of(records: Iterable[Record]) -> RunHistory:
    """Returns the history of some records."""
    history = RunHistory()
    for record in records:
        history.add(record)
    return history
