"""The results of a run for the user: a ledger of the messages and the records that the launcher relays.

Rule: the ledger outlives a coordinator. A coordinator that takes over writes some records again; each counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.core.checks.audit import AuditBook, AuditMarks
from engine.core.checks.loaded_data import LoadedBook
from engine.core.checks.purity import PurityBook
from engine.core.checks.trajectory import TrajectoryRow
from engine.core.config.job import FACTORY, Job, is_due
from engine.core.elastic.move_costs import after_commit, after_epoch
from engine.core.elastic.slow_workers import PaceChange
from engine.core.elastic.worker_times import WorkerTimes, heard
from engine.core.errors import (
    BambooError,
    DivergedError,
    EnvironmentLacksError,
    ExitCode,
    ReplicasDifferError,
    UserCodeError,
    UserError,
    WorkerFailedError,
)
from engine.core.history.record import StampedRecord
from engine.core.history.run_records import AuditRecord, CommitRecord, EpochRecord, GoRecord
from engine.core.messages import (
    AuditMessage,
    CutMessage,
    Evaluation,
    FailedMessage,
    RaisedMessage,
    RefusedMessage,
    ValidationMessage,
)
from engine.core.recovery.vote import VoteMessage
from engine.core.worker_exception import GPU_MEMORY, WorkerException
from engine.runtime.agent.worker_handles import WorkerHandle

_UNNAMED_DATA = "; the job names no data, so it trains on the built-in synthetic float vectors: name data by --data"

_MORE_ROOM = "less memory is taken by a smaller microbatch_size, more stages, or activation_checkpoint: 1"


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
    epochs: list[EpochRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for the user, shown at once
    purity: PurityBook = field(init=False)
    going_at_ns: int = 0
    launched_at_ns: int = 0  # the first of these times, also before the workers were started again
    on_rows: Callable[[int, float, list[TrajectoryRow]], None] = lambda step, loss, rows: None
    times: WorkerTimes = field(default_factory=WorkerTimes)  # of the steps by these workers
    _book: AuditBook = field(init=False)
    _loaded: LoadedBook = field(init=False)  # of the open step
    _closed: int = field(init=False)  # the last step whose rows are complete
    _data_marks: AuditMarks = ()  # of the last committed step
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
            validations={step: found for step, found in self.validations.items() if step <= committed},
            rows=[row for row in self.rows if row.step <= committed],
            epochs=[],
            going_at_ns=0,
            times=WorkerTimes(),
            _data_marks=(),
            _before=self._before | lost,
        )

    def taken_over(self, at_ns: int) -> None:
        """Goes on with results of another host, whose times are of its clock: nothing is timed by them."""
        self.times, self.going_at_ns, self.launched_at_ns = WorkerTimes(), at_ns, 0

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
            costs = after_epoch(self.times.costs, record.owners, is_planned=record.planned)
            self.times = self.times._replace(costs=costs)
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
        """Adds the hashes of some layers of a replica; raises ReplicasDifferError if replicas disagree.

        A replica that is healed after a checkpoint was taken has those of a step before the first one.
        """
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
        self.on_rows(self.committed, self.losses[-1], rows)

    def error_of(
        self, member: WorkerHandle, last: RefusedMessage | FailedMessage | RaisedMessage, *, has_commit: bool
    ) -> BambooError:
        """Returns the error that a worker's last message reports.

        An exception of the user's code before the first commit is the user's mistake: no training is lost. A job that
        does not fit into its GPUs lacks something of the machine.
        """
        if isinstance(last, RefusedMessage):
            return UserError(last.problems)
        worker = member.name
        if isinstance(last, RaisedMessage):
            if last.exception.gpu.startswith(GPU_MEMORY) and not has_commit:
                return EnvironmentLacksError(f"{worker} {last.exception.in_step(last.step)}; {_MORE_ROOM}")
            if last.exception.place and not last.exception.gpu and not has_commit:
                return UserCodeError(self.at_start(last.exception))
            return WorkerFailedError(f"{worker} {last.exception.in_step(last.step)}; full text in {member.log}")
        if last.code == ExitCode.EXPECTATION_FAILED:
            return DivergedError(f"{worker}: {last.error}")
        return BambooError(f"{worker}: {last.error}", last.code)

    def at_start(self, exception: WorkerException) -> str:
        """Returns an exception before training in words; a failed forward tells of data that the job does not name."""
        is_of_forward = exception.place.startswith(("the forward", "layer", "the loss"))
        is_unnamed = self.job.data == "auto" and FACTORY.fullmatch(self.job.model)
        return exception.at_start() + _UNNAMED_DATA * bool(is_of_forward and is_unnamed)

    def validated(self, outcome: ValidationMessage) -> None:
        """Keeps the results of a validation pass."""
        self.validations[outcome.step] = outcome.sets

    def missing(self) -> tuple[str, ...]:
        """Returns in words the results of the last step that a finished run lacks."""
        step = self.committed
        audited = not is_due(self.job.audit, step, True) or any(row.step == step for row in self.rows[-1:])
        found = [] if audited else [f"the hashes of step {step}"]
        is_owed = step >= 0 and step not in self.validations and is_due(self.job.validate_every, step, True)
        found += [f"the validation after step {step}"] if is_owed else []
        return (*found, *(["the last checkpoint"] if self.not_kept else []))


def audit_record(worker: int, audit: AuditMessage) -> AuditRecord:
    """Returns the record of a worker's hashes."""
    rows = tuple(row[:3] for row in audit.rows)  # the marks only explain a difference between replicas
    return AuditRecord(of=worker, step=audit.step, pipeline=audit.pipeline, rows=rows)
