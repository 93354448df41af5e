"""The state of a run by its records: the job, the owners of its slots, the last commit, the faults and the end.

It takes records one by one in the order of the file, so that it can follow a file that still grows. It keeps commits in
columns. `files` has the actions of the run; the history itself has those that its reader added.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, TypeVar

from engine.core.config.job import Job
from engine.core.history.commits import Commits
from engine.core.history.process_records import (
    EndedRecord,
    ExitRecord,
    FailedRecord,
    RestartRecord,
    ResumedRecord,
    StartedRecord,
    TrainingEndedRecord,
)
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
    KeptRecord,
    MarkRecord,
    RaisedRecord,
    SuspicionRecord,
    UnkeptRecord,
)
from engine.core.history.verdict_records import CheckRecord
from engine.core.ownership import Slot, by_slot
from engine.core.texts import not_kept_words

R = TypeVar("R", bound=Record)
# Recoveries are timed by these records, and by some commits around them: ten usual steps, and the steps between.
_TIMED = (EpochRecord, ExitRecord, FailedRecord, FaultRecord, GoRecord, MarkRecord, RaisedRecord, SuspicionRecord)
_AROUND = 13


class ActionFiles:
    """The actions of a run in files, each of a worker and a range of steps; of a history without files, none."""

    def ranges(self) -> dict[int, int]:
        """Returns the first step of each range, with the bytes of its actions."""
        return {}

    def read(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yields each worker with the bytes of its actions in the range that begins with a step."""
        yield from ()


@dataclass(slots=True)
class RunHistory:
    """The history of a run; to read from the middle, give the job, the owners at that time, and `is_training`."""

    job: Job = field(default_factory=lambda: Job(steps=0))  # until the first record
    is_training: bool = False
    owners: dict[Slot, int] = field(default_factory=dict)
    commits: Commits = field(default_factory=Commits)
    files: ActionFiles = field(default_factory=ActionFiles)
    epochs: list[EpochRecord] = field(default_factory=list)  # with the owners of a later `HeirsRecord`
    last_action: dict[int, ActionRecord] = field(default_factory=dict)  # of each worker
    _others: list[Record] = field(default_factory=list)  # all but the commits
    _of: dict[type[Record], list[Any]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Adds the next record."""
        if isinstance(record, CommitRecord):
            self.commits.add(record, len(self._others), self.epochs[-1].epoch if self.epochs else 0)
            return
        self._others.append(record)
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
                self.owners = by_slot(record.owners, self.job.slots)
            case HeirsRecord() if self.epochs:
                self.epochs[-1] = replace(self.epochs[-1], owners=record.owners, shadows=record.shadows)
                self.owners = by_slot(record.owners, self.job.slots)
            case GoRecord():
                self.is_training = True
            case RestartRecord():
                self.is_training = False
            case ResumedRecord():
                self.is_training = False
                self.commits.forget_after(record.step)
                self._of.pop(FailedRecord, None)  # the checkpoint has made up for it

    def add_commits(self, commits: Sequence[tuple[str, ...]]) -> None:
        """Adds the next commits, each as the texts of the fields in its line."""
        if commits:
            self.commits.add_fields(commits, len(self._others), self.epochs[-1].epoch if self.epochs else 0)

    def add_actions(self, actions: Iterable[ActionRecord]) -> None:
        """Adds actions in the order of time: each before the first record that was written after its end."""
        done = sorted(actions, key=attrgetter("end_ns"))
        written_ns = [*accumulate((getattr(each, "at_ns", 0) for each in self._others), max)]
        places = self.commits.places
        before: list[int] = []  # the index of the first commit behind each action
        others: list[Record] = []
        taken = 0
        for action in done:
            other, commit = bisect_left(written_ns, action.end_ns), bisect_left(self.commits.at_ns, action.end_ns)
            place = min(other, places[commit]) if commit < len(places) else other
            others += self._others[taken:place]
            others.append(action)
            taken = max(taken, place)
            before.append(min(commit, bisect_right(places, other)))
            self.last_action[action.worker] = action
        self._others = others + self._others[taken:]
        self._of[ActionRecord] = done
        behind = 0
        for index in range(len(places)):
            while behind < len(before) and before[behind] <= index:
                behind += 1
            places[index] += behind

    @property
    def is_empty(self) -> bool:
        """Whether there is no record yet."""
        return not self._others and not self.commits

    @property
    def records(self) -> Iterator[Record]:
        """The records in the order of the file."""
        return self._with_commits(range(len(self.commits)))

    @property
    def records_of_recoveries(self) -> Iterator[Record]:
        """The records in the order of the file, without the commits that no recovery is timed by."""
        near = {len(self.commits) - 1} if self.commits else set()
        for place, record in enumerate(self._others):
            if isinstance(record, _TIMED):
                at = bisect_right(self.commits.places, place)
                near.update(range(max(0, at - _AROUND), min(at + _AROUND, len(self.commits))))
        return self._with_commits(sorted(near))

    def _with_commits(self, indexes: Iterable[int]) -> Iterator[Record]:
        place = 0
        for index in indexes:
            yield from self._others[place : (place := self.commits.places[index])]
            yield self.commits[index]
        yield from self._others[place:]

    @property
    def training_records(self) -> list[Record]:
        """The records but commits, up to the end of training: the twin and the checks come after it."""
        end = self.training_ended
        return self._others if end is None else self._others[: self._others.index(end) + 1]

    def of(self, kind: type[R]) -> Sequence[R]:
        """Returns the records of one kind."""
        if kind is CommitRecord:
            return self.commits  # type: ignore[return-value]
        return self._of.get(kind, [])

    def first(self, kind: type[R]) -> R | None:
        """Returns the first record of a kind, or None."""
        return next(iter(self.of(kind)), None)

    def behind(self, kind: type[Record]) -> Iterator[Record]:
        """Yields the records behind the first one of a kind; none without it."""
        first = self.first(kind)
        if first is not None:
            place = self._others.index(first)
            yield from self._others[place + 1 :]
            yield from (commit for at, commit in zip(self.commits.places, self.commits, strict=True) if at > place)

    def in_epochs(self, *kinds: type[R]) -> Iterator[tuple[int, R]]:
        """Yields (epoch, record) for the records of some kinds; the epoch is 0 before the first."""
        epoch = 0
        for record in self.records if CommitRecord in kinds else self._others:
            epoch = record.epoch if isinstance(record, EpochRecord) else epoch
            if isinstance(record, kinds):
                yield epoch, record

    @property
    def begin_ns(self) -> int:
        """The time at which training began, else the time of the first record, else 0."""
        stamped = (each for each in self._others if isinstance(each, StampedRecord))
        first = self.first(GoRecord) or next(stamped, None)
        return first.at_ns if first else 0

    @property
    def committed(self) -> int:
        """The last committed step, -1 before step 0."""
        resumed = self.of(ResumedRecord)
        return self.commits.steps[-1] if self.commits else resumed[-1].step if resumed else -1

    @property
    def not_kept(self) -> str:
        """In words, that the last checkpoint could not be kept; empty if it could, or if there was none to keep."""
        kept, why, at = None, "", -1
        for each in self._others:
            match each:
                case KeptRecord():
                    kept, why = each.step, why if each.step < at else ""
                case UnkeptRecord():
                    why, at = each.why, each.step
        return not_kept_words(kept, why)

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
