"""The state of a run by its records: the job, the owners of its slots, the last commit, the faults and the end.

It takes records one by one in the order of the file, so that it can follow a file that still grows. It keeps commits in
columns. `files` has the actions of the run; the history itself has those that its reader added.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import isnan, nan
from operator import attrgetter
from typing import Any, Literal, TypeVar, overload

from engine.core.exclusion import Cause
from engine.core.history.process_records import (
    CheckRecord,
    ClockRecord,
    EndedRecord,
    ExitRecord,
    FailedRecord,
    HeardRecord,
    HostRecord,
    LostRecord,
    RestartRecord,
    ResumedRecord,
    StartedRecord,
    TrainingEndedRecord,
    WaitingRecord,
    on_clock,
)
from engine.core.history.run_records import (
    ActionRecord,
    CommitRecord,
    ConfirmedRecord,
    CrampedRecord,
    EpochRecord,
    FaultRecord,
    FinishedRecord,
    GoRecord,
    HeirsRecord,
    JobRecord,
    KeptRecord,
    MarkRecord,
    NoticeRecord,
    RaisedRecord,
    Record,
    StampedRecord,
    StaysRecord,
    StoppedEarlyRecord,
    SuspicionRecord,
    ThinnedRecord,
    UnkeptRecord,
    UnreadLine,
)
from engine.core.job.job import Job
from engine.core.ownership import Slot, by_slot
from engine.core.texts import counted, not_kept_words, numbered

# The commits of a run in columns: a long run has millions, and a record of each would take four times the memory.


class Commits(Sequence[CommitRecord]):
    """Commits in file order; `places` has the number of other records before each, `epochs` its epoch."""

    def __init__(self) -> None:
        self.steps, self.at_ns, self.places, self.epochs = array("q"), array("q"), array("q"), array("q")
        self.losses, self.grad_norms, self._clip_factors = array("d"), array("d"), array("d")
        self._rates = array("d")  # NaN without one
        self._writers: dict[int, tuple[int, int]] = {}  # index -> worker and pid, where they change
        self._last: set[int] = set()  # indexes of commits that no step follows

    def add(self, commit: CommitRecord, place: int, epoch: int) -> None:
        """Adds the next commit."""
        writer = (commit.worker, commit.pid)
        if not self._writers or self._writers[max(self._writers)] != writer:
            self._writers[len(self)] = writer
        if commit.last:
            self._last.add(len(self))
        self.steps.append(commit.step)
        self.at_ns.append(commit.at_ns)
        self.places.append(place)
        self.epochs.append(epoch)
        self.losses.append(commit.loss)
        self.grad_norms.append(commit.grad_norm)
        self._clip_factors.append(commit.clip_factor)
        self._rates.append(nan if commit.lr is None else commit.lr)

    def forget_after(self, step: int) -> None:
        """Drops the commits behind a step: they are lost, and come again."""
        length = len(self)
        while length and self.steps[length - 1] > step:
            length -= 1
        for counts in (self.steps, self.at_ns, self.places, self.epochs):
            del counts[length:]
        for numbers in (self.losses, self.grad_norms, self._clip_factors, self._rates):
            del numbers[length:]
        self._writers = {index: writer for index, writer in self._writers.items() if index < length}
        self._last = {index for index in self._last if index < length}

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: int) -> CommitRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[CommitRecord]: ...

    def __getitem__(self, index: int | slice) -> CommitRecord | list[CommitRecord]:
        if isinstance(index, slice):
            return [self._record(each) for each in range(*index.indices(len(self)))]
        return self._record(range(len(self))[index])

    def __iter__(self) -> Iterator[CommitRecord]:
        return map(self._record, range(len(self)))

    def _record(self, index: int) -> CommitRecord:
        worker, pid = self._writers[max(each for each in self._writers if each <= index)]
        return CommitRecord(
            worker=worker,
            pid=pid,
            at_ns=self.at_ns[index],
            step=self.steps[index],
            loss=self.losses[index],
            grad_norm=self.grad_norms[index],
            clip_factor=self._clip_factors[index],
            last=index in self._last,
            lr=None if isnan(lr := self._rates[index]) else lr,
        )


R = TypeVar("R", bound=Record)
# Recoveries are timed by these records, and by some commits around them: ten usual steps, and the steps between.
_TIMED = (EpochRecord, ExitRecord, FailedRecord, FaultRecord, GoRecord, MarkRecord, RaisedRecord, SuspicionRecord)
_AROUND = 13


class ActionFiles:
    """The files with the actions of a run, each of a worker and a range of steps; this one has none."""

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

    def add_actions(self, actions: Iterable[ActionRecord]) -> None:
        """Adds actions in the order of time: each before the first record that was written after its end."""
        done = sorted(actions, key=attrgetter("end_ns"))
        written_ns = [*accumulate((getattr(each, "at_ns", 0) for each in self._others), max)]
        places = self.commits.places
        before: list[int] = []  # the index of the first commit behind each action
        others: list[Record] = []
        num_actions = 0
        for action in done:
            other, commit = bisect_left(written_ns, action.end_ns), bisect_left(self.commits.at_ns, action.end_ns)
            place = min(other, places[commit]) if commit < len(places) else other
            others += self._others[num_actions:place]
            others.append(action)
            num_actions = max(num_actions, place)
            before.append(min(commit, bisect_right(places, other)))
            self.last_action[action.worker] = action
        self._others = others + self._others[num_actions:]
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
    def num_steps(self) -> int:
        """The number of steps that the run was to commit: those of its job, or of an early stop."""
        stopped = self.of(StoppedEarlyRecord)
        return stopped[-1].step + 1 if stopped and stopped[-1].step == self.committed else self.job.steps

    @property
    def not_kept(self) -> str:
        """In words, that the last checkpoint could not be kept; empty if it could, or if there was none to keep."""
        step, why, at = None, "", -1
        for record in self._others:
            match record:
                case KeptRecord():
                    step, why = record.step, why if record.step < at else ""
                case UnkeptRecord():
                    why, at = record.why, record.step
        return not_kept_words(step, why)

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
        failures = [check for check in self.of(CheckRecord) if check.result in ("failed", "invalid")]
        if self.error and any(check.name == "outcome" for check in failures):
            return []
        return sorted(failures, key=attrgetter("result"))

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


# How the process of each worker ended, by the records of its run.
#
# Rule: a worker that a verdict evicts, or whose end was not expected, is dead. A worker that left with notice has left.
# A worker that reported its final figures has finished. The launcher stopped the others. Numbers are reused when all
# workers are restarted; then only the records since the last start of a worker count.

WorkerEnd = Literal["dead", "left", "finished", "stopped"]

_Of = TypeVar("_Of", CrampedRecord, ExitRecord, FinishedRecord, NoticeRecord, RaisedRecord, StaysRecord, WaitingRecord)


def last_starts(history: RunHistory) -> dict[int, StartedRecord]:
    """Returns the last start of each worker."""
    return {each.of: each for each in history.of(StartedRecord)}


def since_start(history: RunHistory, kind: type[_Of]) -> list[_Of]:
    """Returns the records of a kind that are about the last process of their worker."""
    starts = last_starts(history)
    return [each for each in history.of(kind) if each.of not in starts or each.at_ns >= starts[each.of].at_ns]


def worker_ends(history: RunHistory) -> dict[int, WorkerEnd]:
    """Returns the end of each worker whose last process has ended."""
    starts = last_starts(history)
    out = {
        exclusion.worker: exclusion
        for epoch in history.of(EpochRecord)
        for exclusion in epoch.verdict
        if exclusion.worker not in starts or epoch.at_ns >= starts[exclusion.worker].at_ns
    }
    noticed = {each.of for each in since_start(history, NoticeRecord)}
    not_taken_in = {each.of for each in since_start(history, WaitingRecord) if each.lost}
    lost = {worker for worker, each in out.items() if each.is_loss} | not_taken_in - noticed
    left = {worker for worker, each in out.items() if each.cause is Cause.LEFT} | not_taken_in & noticed
    finished = {each.of for each in since_start(history, FinishedRecord)}
    ends: dict[int, WorkerEnd] = {}
    for ending in since_start(history, ExitRecord):
        worker = ending.of
        if not ending.expected or worker in lost:
            ends[worker] = "dead"
        elif worker in left:
            ends[worker] = "left"
        else:
            ends[worker] = "finished" if worker in finished else "stopped"
    return ends


# The decisions of other hosts, from the copies in the records of one host: its folder alone shows the run.
_EPOCH = '{"event":"epoch",'


class ReplicatedDecisions:
    """Reads copies of decisions as records of the host that has them, with times roughly on its clock."""

    def __init__(self, read: Callable[[str], Record]) -> None:
        self._read = read  # the codec of records
        self._offsets_ns: dict[str, int] = {}  # of the clock of each other host, as last recorded

    def decision(self, record: Record) -> StampedRecord | None:
        """Takes the next record of a host; returns the decision that it is a copy of, None for any other record."""
        if isinstance(record, ClockRecord):
            self._offsets_ns[record.of] = (record.least_ns + record.most_ns) // 2
        if not isinstance(record, HeardRecord):
            return None
        decision = self._read(record.line)
        if not isinstance(decision, StampedRecord):
            return None
        offset_ns = self._offsets_ns.get(record.of, decision.at_ns - record.at_ns)
        return on_clock(decision, lambda at_ns: at_ns - offset_ns)


def coordinating_host(history: RunHistory) -> str:
    """Returns the host that coordinates the run, by the last copy in the folder of another host; empty in its own."""
    decisions = history.of(HeardRecord)
    num_epochs = sum(each.line.startswith(_EPOCH) for each in decisions)
    return decisions[-1].of if decisions and len(history.epochs) <= num_epochs else ""


# The gaps in the records of a run, in sentences for reports and the status.
_MOST_NAMED = 5


def gaps(history: RunHistory) -> tuple[str, ...]:
    """Returns one sentence for each kind of gap; empty if the record is whole."""
    return (*map(str, history.of(LostRecord)), *_unread(history), *_thinned(history), *_elsewhere(history))


def _unread(history: RunHistory) -> Iterator[str]:
    if lines := [each.number for each in history.of(UnreadLine)]:
        more = ", ..." if len(lines) > _MOST_NAMED else ""
        which = numbered("line", lines[:_MOST_NAMED])
        yield f"{counted(len(lines), 'line')} of events.jsonl could not be read ({which}{more})"


def _thinned(history: RunHistory) -> Iterator[str]:
    """Yields the steps that were left out, from the first to the last, and how many in between are there."""
    if left_out := left_out_steps(history):
        first, last = left_out[0][0], left_out[-1][1]
        num_kept = last - first + 1 - sum(stop - start + 1 for start, stop in left_out)
        but = f", but for {num_kept:,} of them," if num_kept else ""
        yield (
            f"the actions and hashes of steps {first:,} to {last:,}{but} were left out (events_max is "
            f"{history.job.events_max}); the steps near failures and faults are there"
        )


def _elsewhere(history: RunHistory) -> Iterator[str]:
    if chief := coordinating_host(history):
        host = history.first(HostRecord)
        own = f"host {host.node}" if host is not None and host.node else "one host"
        verb = "coordinates" if history.ended is None else "coordinated"
        yield f"these are the records of {own}; host {chief} {verb} the run, and its run folder has the report"


def left_out_steps(history: RunHistory) -> list[tuple[int, int]]:
    """Returns the steps without actions, as (first, last) in order."""
    return sorted(steps for each in history.of(ThinnedRecord) for steps in each.steps)
