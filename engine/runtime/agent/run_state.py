"""The results of a run for the user: a ledger of the messages and the records that the launcher relays.

Rule: the ledger outlives a coordinator. A coordinator that takes over writes some records again; each counts once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.checks.trajectory import AuditBook, AuditMarks, LoadedBook, PurityBook, TrajectoryRow
from engine.core.errors import (
    GPU_MEMORY,
    BambooError,
    DivergedError,
    EnvironmentLacksError,
    ExitCode,
    RepeatedExceptionError,
    ReplicasDifferError,
    StorageError,
    UserCodeError,
    UserError,
    WorkerException,
    WorkerFailedError,
)
from engine.core.faults.injection import InheritedFaults
from engine.core.history.process_records import TrainingEndedRecord
from engine.core.history.run_records import AuditRecord, CommitRecord, EpochRecord, GoRecord, StampedRecord
from engine.core.job.job import FACTORY, Job, is_due
from engine.core.kv import Lease
from engine.core.message_kinds import ToWorker
from engine.core.messages import (
    AuditMessage,
    CutMessage,
    Evaluation,
    FailedMessage,
    RaisedMessage,
    RefusedMessage,
    ValidationMessage,
    WelcomeMessage,
)
from engine.core.monitors import NO_MONITORS, Monitors, in_words
from engine.core.program.ballot import VoteMessage
from engine.core.protocol.state import Sighting
from engine.core.protocol.worker_times import PaceChange, WorkerTimes, after_commit, heard, with_owners
from engine.files.run_folder import RunFolder
from engine.runtime.agent.scribe import Scribe
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.process.clock import now_ns
from engine.runtime.process.progress_board import Progress, ProgressBoard
from engine.runtime.process.recorder import Recorder
from engine.runtime.process.spawner import Started

_UNNAMED_DATA = "; the job names no data, so it trains on the built-in synthetic float vectors: name data by --data"

_MORE_ROOM = "to use less memory: a smaller microbatch_size, more stages, or activation_checkpoint: 1"


class ClosedStep(NamedTuple):
    """A step whose hashes are complete and agree; it has no rows otherwise."""

    step: int
    loss: float
    rows: list[TrajectoryRow]


@dataclass(slots=True)
class RunState:
    """The results of a run so far. Times are monotonic nanoseconds, 0 for an event that has not happened.

    `begun` is the last step before those of this run: of the checkpoint that it began with, -1 without one. `kept` is
    the last step that was kept as a checkpoint; `not_kept` is the reason if a later one was not. `rows` may have steps
    that were lost, and are trained again: their hashes must come again.
    """

    job: Job
    begun: int = -1
    kept: int | None = None
    not_kept: str = ""
    layers: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    samples: int = 0  # in the training set; 0 for data without limit
    losses: list[float] = field(default_factory=list)
    validations: dict[int, tuple[Evaluation, ...]] = field(default_factory=dict)
    rows: list[TrajectoryRow] = field(default_factory=list)
    monitors: Monitors = NO_MONITORS  # as of the coordinator's last decision
    epochs: list[EpochRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for the user, shown at once
    purity: PurityBook = field(init=False)
    going_at_ns: int = 0
    launched_at_ns: int = 0  # the first of these times, also before the workers were started again
    closed: ClosedStep | None = None  # the last one, until `take_closed`
    times: WorkerTimes = field(default_factory=WorkerTimes)  # of the steps by these workers
    _book: AuditBook = field(init=False)
    _loaded: LoadedBook = field(init=False)  # of the open step
    _closed: int = field(init=False)  # the last step whose rows are complete
    _data_marks: AuditMarks = ()  # of the last committed step
    _raised: dict[tuple[int, str], int] = field(default_factory=dict)  # the first worker, by step and kind
    _before: dict[tuple[int, int], TrajectoryRow] = field(default_factory=dict)  # of lost steps, by step and layer

    def __post_init__(self) -> None:
        self.purity = PurityBook(self.job.data)
        self._closed = self.committed
        self._loaded = LoadedBook(self.job.data, refuses=self.job.check_pure)

    @property
    def committed(self) -> int:
        """The last committed step, -1 before step 0."""
        return self.begun + len(self.losses)

    def again(self, committed: int) -> RunState:
        """Returns the results with which the workers are started again after a step; the steps behind it are lost."""
        begun = min(self.begun, committed)
        lost = {(row.step, row.layer): row for row in self.rows if row.step > committed}
        return replace(
            self,
            begun=begun,
            losses=self.losses[: max(0, committed - self.begun)],
            validations={step: sets for step, sets in self.validations.items() if step <= committed},
            rows=[row for row in self.rows if row.step <= committed],
            epochs=[],
            closed=None,
            going_at_ns=0,
            times=WorkerTimes(),
            _data_marks=(),
            _raised={},
            _before=self._before | lost,
        )

    def taken_over(self, at_ns: int) -> None:
        """Goes on with results of another host, whose times are of its clock: nothing is timed by them."""
        self.times, self.going_at_ns, self.launched_at_ns, self.closed = WorkerTimes(), at_ns, 0, None

    def cut(self, cut: CutMessage) -> None:
        """Keeps the partition of the model, and the size of the training set."""
        self.layers, self.starts, self.samples = cut.layers, cut.starts, cut.samples
        self._book = AuditBook(len(self.layers), self.job.pipelines)

    def parts_of(self, stage: int) -> str:
        """Returns the code of the user in a stage, such as ``the data, layer 0 (fc1) or layer 1 (fc2)``."""
        stop = self.starts[stage + 1] if stage + 1 < len(self.starts) else len(self.layers)
        layers = [f"layer {index} ({self.layers[index]})" for index in range(self.starts[stage], stop)]
        *others, last = ["the data"] * (stage == 0) + layers + ["the loss"] * (stop == len(self.layers))
        return f"{', '.join(others)} or {last}" if others else last

    def note(self, text: str) -> bool:
        """Adds a note for the user; returns whether it is new."""
        is_news = text not in self.notes
        self.notes += [text] * is_news
        return is_news

    def books(self, record: StampedRecord) -> bool:
        """Takes a record of the coordinator into the results; returns False for one that was taken before."""
        if isinstance(record, CommitRecord):
            if record.step <= self.committed:
                return False
            # Every voter has sent its hashes of the previous step before its vote.
            self.close_book()
            self._data_marks = self._loaded.close()
            self.losses.append(record.loss)
            self.times = self.times._replace(costs=after_commit(self.times.costs, record.at_ns))
        elif isinstance(record, EpochRecord):
            self.epochs.append(record)
            self.times = with_owners(self.times, record.owners, is_planned=record.planned)
        elif isinstance(record, GoRecord):
            self.going_at_ns = self.going_at_ns or record.at_ns
            self.launched_at_ns = self.launched_at_ns or record.at_ns
        return True

    def vote(self, worker: int, vote: VoteMessage) -> None:
        """Compares the data of a worker's votes; raises UserError if two workers have loaded different data."""
        if vote.step == self.committed + 1:  # the marks of a worker count that dies before the commit
            for each in vote.slots:
                self._loaded.add(vote.step, worker, each.pipeline, dict(zip(each.loaded, each.marks, strict=True)))

    def computed(self, worker: int, vote: VoteMessage) -> tuple[PaceChange, ...]:
        """Takes the times of a worker's votes; returns the workers that have become slow, or are no longer."""
        self.times, changes = heard(self.times, worker, vote)
        for each in changes:
            self.note(f"step {each.step}: {each.why}")
        return changes

    def progress(self) -> str:
        """Returns the last committed step, in words."""
        return f"last committed step {self.committed}" if self.committed >= 0 else "no step was committed"

    def audit(self, worker: int, audit: AuditMessage) -> None:
        """Adds a replica's hashes, after a heal perhaps of a step before the first; raises ReplicasDifferError."""
        if audit.step == self.committed > self._closed:
            hashes = {layer: (state, buffers) for layer, state, buffers, _, _ in audit.rows}
            marks = {layer: (of_state, of_buffers) for layer, _, _, of_state, of_buffers in audit.rows}
            self._book.add(audit.step, worker, audit.pipeline, hashes, marks)

    def close_book(self) -> None:
        """Adds the trajectory rows of the last committed step; raises ReplicasDifferError for those of a lost step."""
        if self.committed <= self._closed:
            return
        self._closed = self.committed
        rows = self._book.close(self.committed, self.losses[-1], self._data_marks)
        for row in rows:
            before = self._before.get((row.step, row.layer), row)
            if row != before:
                again = f"step {row.step}, trained again after a checkpoint"
                raise ReplicasDifferError(f"{again}: layer {row.layer} has other weights than before")
        self.rows += rows
        self.closed = ClosedStep(self.committed, self.losses[-1], rows)

    def take_closed(self) -> ClosedStep | None:
        """Returns the step that was closed last, once."""
        closed, self.closed = self.closed, None
        return closed

    def error_of(
        self, member: WorkerHandle, last: RefusedMessage | FailedMessage | RaisedMessage, *, has_commit: bool
    ) -> BambooError:
        """Returns the error of a worker's last message.

        Before the first commit, an exception of the user's code is the user's mistake, and too little GPU memory is the
        machine's.
        """
        if isinstance(last, RefusedMessage):
            return UserError(last.problems)
        worker = member.name
        if isinstance(last, RaisedMessage):
            return self._error_of_raised(member, last, has_commit=has_commit)
        if last.code == ExitCode.NOT_FINITE:
            return DivergedError(f"{worker}: {last.error}")
        return BambooError(f"{worker}: {last.error}", last.code)

    def _error_of_raised(self, member: WorkerHandle, last: RaisedMessage, *, has_commit: bool) -> BambooError:
        exception, words = last.exception, f"{member.name} {last.exception.in_step(last.step)}"
        if exception.gpu.startswith(GPU_MEMORY) and not has_commit:
            return EnvironmentLacksError(f"{words}; {_MORE_ROOM}")
        if exception.place and not exception.gpu and not has_commit:
            return UserCodeError(self.at_start(exception))
        if (first := self.first_to_raise(member.worker, last)) != member.worker:
            both = exception.of_both(first, member.worker, last.step)
            return RepeatedExceptionError(f"{both}; full text in {member.log}")
        return WorkerFailedError(f"{words}; full text in {member.log}")

    def first_to_raise(self, worker: int, last: RaisedMessage) -> int:
        """Returns the first worker that raised in its step: `worker` or an earlier one; each GPU fails for itself."""
        if last.exception.gpu:
            return worker
        return self._raised.setdefault((last.step, last.exception.kind), worker)

    def at_start(self, exception: WorkerException) -> str:
        """Returns an exception before training in words; a failed forward tells of data that the job does not name."""
        is_of_forward = exception.place.startswith(("the forward", "layer", "the loss"))
        is_unnamed = self.job.data == "auto" and FACTORY.fullmatch(self.job.model)
        return exception.at_start() + _UNNAMED_DATA * bool(is_of_forward and is_unnamed)

    def validated(self, outcome: ValidationMessage) -> None:
        """Keeps the results of a validation pass."""
        self.validations[outcome.step] = outcome.sets

    def best(self) -> int | None:
        """Returns the step that is best by the job's field `best`, or of the run before a resume; None without one."""
        best = self.monitors.best
        return best.step if self.job.best and best.value is not None else None

    @property
    def has_all_steps(self) -> bool:
        """Whether the last step of the job, or of an early stop, is committed."""
        return self.committed >= self.job.steps - 1 or bool(self.stopped_early)

    @property
    def stopped_early(self) -> str:
        """Why the last committed step is the last one, if validations did not improve; empty otherwise."""
        return in_words(self.monitors) if 0 <= self.monitors.ends_at == self.committed else ""

    def missing(self) -> tuple[str, ...]:
        """Returns in words the results of the last step that a finished run lacks."""
        step = self.committed
        audited = not is_due(self.job.audit, step, True) or any(row.step == step for row in self.rows[-1:])
        results = [] if audited else [f"the hashes of step {step}"]
        is_owed = step >= 0 and step not in self.validations and is_due(self.job.validate_every, step, True)
        results += [f"the validation after step {step}"] if is_owed else []
        return (*results, *(["the last checkpoint"] if self.not_kept else []))


def audit_record(worker: int, audit: AuditMessage) -> AuditRecord:
    """Returns the record of a worker's hashes."""
    rows = tuple(row[:3] for row in audit.rows)  # the marks only explain a difference between replicas
    return AuditRecord(of=worker, step=audit.step, pipeline=audit.pipeline, rows=rows)


# The view of a run for pictures while it runs, and the ending of a run.
LEFT = "left"  # all workers of this host have left after a notice; the run continues, and another host coordinates it


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker in a picture: seconds since its last message and in its action; `doing`: a slow part of its start."""

    worker: int
    pid: int
    slots: tuple[tuple[int, int], ...]
    state: str
    progress: Progress
    peak_stash: int
    peak_memory_kib: int
    silent_s: float = 0.0
    inside_s: float = 0.0
    doing: str = ""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run in a picture, a few times a second; the agent goes on to change the run state."""

    run_state: RunState
    workers: tuple[WorkerView, ...]
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """The ending of a session: its outcome in one word, the error if there was one, and the last view of the run.

    `missing` names the results of the last step that a finished run lacks, because a worker ended before it sent them.
    `loggers` has the end of each logger as plain values.
    """

    outcome: str
    exit_code: int
    error: BambooError | None
    view: RunView
    started_at_ns: int
    ended_at_ns: int
    missing: tuple[str, ...] = ()
    loggers: tuple[Mapping[str, Any], ...] = ()

    def unstored(self, error: StorageError) -> Ending:
        """Returns the ending of a run whose records or results are not all on disk; one by a signal keeps its code."""
        if self.outcome == "interrupted":
            return replace(self, error=self.error or error)
        cause = self.error or StorageError(f"{error}; {self.view.run_state.progress()}")
        return replace(self, outcome="failed", exit_code=int(error.exit_code), error=cause)


def worker_view(member: WorkerHandle, board: ProgressBoard, sighting: Sighting | None, *, is_slow: bool) -> WorkerView:
    """Returns the picture of a worker now."""
    silent_s, inside_s = (0.0, 0.0) if sighting is None else sighting.ages_s(now_ns())
    return WorkerView(
        member.worker,
        member.child.pid,
        member.slots,
        "slow" if is_slow and member.state == "running" else member.state,
        member.child.progress(member.worker, board),
        max(member.peak_stash.values(), default=0),
        member.peak_memory_kib,
        silent_s,
        inside_s,
        member.doing,
    )


def ended(recorder: Recorder, ending: Ending) -> Ending:
    """Records the end of training; returns it, or the end of a run whose events cannot be written any more."""
    try:
        recorder.write(TrainingEndedRecord(outcome=ending.outcome, exit_code=ending.exit_code))
        recorder.settle()
    except StorageError as error:
        if ending.error is None:
            return ending.unstored(error)
    return ending


@contextlib.contextmanager
def reporting_unwritten() -> Iterator[None]:
    """Tells the user of records that a process which ends by force leaves unwritten."""
    try:
        yield
    except StorageError as error:
        os.write(2, f"bamboo: {error}\n".encode())


# A run that another host has coordinated, as the agent of the next one takes it over: its workers go on.
#
#     the host before ends    the store has the state, each host has its processes, this host has heard the results
#     this agent              gets a handle for each process, lets the coordinator take over, and hears again what the
#                             workers have said that the host before may not have handled
#
# Rule: a member without a process counts as ended, with its host if that is lost. So the loss of a host is one verdict.


class InheritedProcess(NamedTuple):
    """The process of a worker of a host, of which `adopt` makes a handle."""

    worker: int
    host: str
    adopt: Callable[[], Started]


class InheritedRun(NamedTuple):
    """A run to go on with; `hear_again` lets the words come that were said before.

    `home` is the folder in which the run began: its workers keep checkpoints there, if the job names no other place,
    and these have its name. `faults` are those of which this host has heard; `lost` is the host before. `welcomes` by
    worker, and `place`, were told to the workers; `last` is their greatest number. This host has had so many `notices`.
    """

    home: Path
    results: RunState
    processes: Sequence[InheritedProcess]
    hear_again: Callable[[], None]
    faults: InheritedFaults
    lost: str
    welcomes: Mapping[int, WelcomeMessage]
    place: Sequence[ToWorker]
    last: int
    notices: int


class FailoverContext(NamedTuple):
    """What a session has beside its servers: a scribe, else it waits for the disk itself; with several hosts a lease.

    `folder` and `inherited` are of a run to continue; without `inherited` all workers begin again.
    """

    lease: Lease | None = None
    folder: RunFolder | None = None
    inherited: InheritedRun | None = None
    scribe: Scribe | None = None


NO_SEAT = FailoverContext()
