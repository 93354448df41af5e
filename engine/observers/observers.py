"""The loggers of a run as processes beside its launcher: their start, their errors, and the wait at the end.

Rules: no thread of the launcher runs a logger, and the launcher never waits for one before the end of training. During
training, a logger that uses more than `_SHARE` of a core only gets a quarter of the idle time. Afterwards it has
`START_S` to start, and from then on `DRAIN_S` to log the rest, or `INTERRUPTED_S` after an interrupt. The launcher
reports the steps that a logger has not logged, and why one has ended; loggers never decide the exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, TypeVar

from engine.core.checks.recoveries import Recovery, RecoveryLog
from engine.core.errors import Problem, nearest
from engine.core.history.process_records import TrainingEndedRecord
from engine.core.history.run_records import (
    CommitRecord,
    EpochRecord,
    GoRecord,
    HeirsRecord,
    JobRecord,
    MovedRecord,
    NormsRecord,
    PartitionRecord,
    Record,
    ValidationRecord,
)
from engine.core.job.job import FACTORY, Job, logger_names
from engine.core.job.torch_parts import LR_SCHEDULES, learning_rate
from engine.core.ownership import Slot
from engine.files.atomic_write import closing_fd, open_to_append
from engine.files.events_file import GrowingEvents, StepReader, read_history
from engine.observers.loggers import (
    CoverDone,
    PhaseDone,
    RecoveryDone,
    StepDone,
    StepTimes,
    TrainingDone,
    ValidationDone,
)
from engine.runtime.process import subprocesses
from engine.runtime.process.interrupts import present

_MOST_TIMED = 100_000  # actions


class LoggerFeed:
    """Follows the records of a run, and calls the methods of a logger for commits, validations and recoveries.

    A method that the logger lacks is not called. `took` is called with each logged step.
    """

    def __init__(self, logger: object, events: Path, took: Callable[[int], None] = lambda step: None):
        self.last_step = -1  # that was logged
        self.is_over = False
        self._logger, self._took = logger, took
        self._folder = events.parent
        self._growing = GrowingEvents(events)
        self._log = RecoveryLog()
        self._before_ns = 0  # the time of the last commit, or of the start of training
        self._uncovered: tuple[Slot, ...] | None = None  # as reported

    def read_on(self) -> None:
        """Passes on the records since the last call, up to the end of training."""
        for record in () if self.is_over else self._growing.news():
            self._take(record)
            if self.is_over:
                return

    def _take(self, record: Record) -> None:
        recoveries = tuple(map(_recovery_done, self._log.read(record)))
        match record:
            case JobRecord():
                self._call("start", record.job, self._folder)
            case GoRecord():
                self._before_ns = self._before_ns or record.at_ns
            case CommitRecord():
                for recovery in recoveries:
                    self._call("recovery", recovery)
                self._call("step", self._step(record, recoveries))
                self._before_ns, self.last_step = record.at_ns, record.step
                self._took(record.step)
            case EpochRecord() | HeirsRecord():
                self._cover(_uncovered(self._log.history.epochs[-1], self._log.history.job), record.at_ns)
            case MovedRecord(program="heal"):  # the new shadows have the state
                self._cover((), record.at_ns)
            case ValidationRecord():
                figures = record.loss, record.metrics, _wall_s(record.at_ns)
                self._call("validation", ValidationDone(record.step, record.name, record.samples, *figures))
            case TrainingEndedRecord():
                history = self._log.history
                self._tell_times(record.outcome)
                ended = history.committed + 1, history.error, _wall_s(record.at_ns), history.notice
                self._call("finish", TrainingDone(record.outcome, record.exit_code, *ended))
                self.is_over = True

    def _tell_times(self, outcome: str) -> None:
        """Reads actions of the run, which takes too long for a step; there is no time for it after an interrupt."""
        is_left_out = outcome == "interrupted" or not hasattr(self._logger, "times")
        if is_left_out or not StepReader(self._folder).num_bytes:
            return
        from engine.report.load import load

        time = load(read_history(self._growing.path), most_actions=_MOST_TIMED).time
        means = time.drop(columns=["worker", "flops", "mfu"]).groupby("step").mean()
        for step, *ms in means.itertuples():
            kinds = (name.removesuffix("_ms") for name in means.columns)
            self._call("times", StepTimes(int(step), dict(zip(kinds, ms, strict=True))))

    def _step(self, record: CommitRecord, recoveries: tuple[RecoveryDone, ...]) -> StepDone:
        job, lr = self._log.history.job, record.lr
        if job.lr_schedule in LR_SCHEDULES:
            lr = learning_rate(job.lr_schedule, job.lr, record.step, job.steps, job.warmup_steps)
        return StepDone(
            record.step,
            record.loss,
            record.grad_norm,
            lr,
            (record.at_ns - self._before_ns) / 1e9 if self._before_ns else 0.0,
            job.pipelines * job.microbatches * job.microbatch_size,
            _wall_s(record.at_ns),
            recoveries,
            self._layer_norms(record.step),
        )

    def _cover(self, uncovered: tuple[Slot, ...], at_ns: int) -> None:
        if uncovered != self._uncovered:
            self._uncovered = uncovered
            self._call("cover", CoverDone(uncovered, _wall_s(at_ns)))

    def _layer_norms(self, step: int) -> dict[str, float]:
        """Returns the norms of a step, which are recorded before its commit, by number and name of the layer."""
        norms, cuts = self._log.history.of(NormsRecord), self._log.history.of(PartitionRecord)
        if not norms or not cuts or norms[-1].step != step:
            return {}
        return {f"{layer}.{cuts[-1].layers[layer]}": norm for layer, norm in norms[-1].norms}

    def _call(self, name: str, *values: object) -> None:
        method = getattr(self._logger, name, None)
        if method is not None:
            method(*values)


def _recovery_done(recovery: Recovery) -> RecoveryDone:
    stall = recovery.stall
    workers = tuple(out.worker for out in recovery.verdict)
    stall_ms = None if stall is None else stall.least_ns / 1e6
    facts = recovery.rung, stall_ms, recovery.lost_steps, str(recovery)
    return RecoveryDone(recovery.step, workers, *facts, tuple(_phases(recovery)))


def _phases(recovery: Recovery) -> Iterator[PhaseDone]:
    """Yields the phases that a report shows too, in the order in which they ended."""
    merged = {} if recovery.resume_ns is None else {"merged": recovery.resume_ns}
    reached_ns = recovery.begin_ns
    for phase, at_ns in sorted({**recovery.points_ns, **merged}.items(), key=itemgetter(1)):
        begin_ns, reached_ns = reached_ns, max(reached_ns, at_ns)
        if phase in recovery.reported_ns:
            yield PhaseDone(phase, _wall_s(begin_ns), _wall_s(reached_ns))


def _uncovered(epoch: EpochRecord, job: Job) -> tuple[Slot, ...]:
    """Returns the slots that fewer than two members hold; with fsdp, each pipeline has other parts of the state."""
    shadows = dict(enumerate(epoch.shadows))
    holders: dict[Slot, set[int]] = {}
    for place, owner in enumerate(epoch.owners):
        pipeline, slot = divmod(place, job.slots)
        workers = holders.setdefault((pipeline * job.fsdp, slot), set())
        workers |= {owner, *shadows.get(place, ())} & {*epoch.members}
    slots = (divmod(place, job.slots) for place in range(len(epoch.owners)))
    return tuple(slot for slot in slots if len(holders[slot[0] * job.fsdp, slot[1]]) < 2)


def _wall_s(at_ns: int) -> float:
    """Returns a time of the host's monotonic clock as seconds since 1970."""
    return time.time() - (time.monotonic_ns() - at_ns) / 1e9


_HEAD = Struct("<qqq")  # the last step, whether the logger has finished, and whether it has started
_MOST_OF_TEXT = 1_000


class LoggerProgress(NamedTuple):
    """The last logged step, whether the logger has finished, its error, if any, and whether it has started."""

    last_step: int = -1
    is_over: bool = False
    error: str = ""
    has_started: bool = True


class ProgressPage:
    """The progress of a logger in memory shared by its process and the launcher; the writer may be killed any time."""

    def __init__(self, fd: int):
        self.fd = fd

    @staticmethod
    def new() -> ProgressPage:
        """Returns an empty page."""
        page = ProgressPage(os.memfd_create("bamboo-logger"))
        page.write(LoggerProgress(has_started=False))
        return page

    def write(self, progress: LoggerProgress) -> None:
        """Replaces the progress."""
        text = progress.error.encode(errors="replace")[:_MOST_OF_TEXT]
        os.pwrite(self.fd, _HEAD.pack(progress.last_step, progress.is_over, progress.has_started) + text, 0)

    def read(self) -> LoggerProgress:
        """Returns the progress."""
        data = os.pread(self.fd, _HEAD.size + _MOST_OF_TEXT, 0)
        last_step, is_over, has_started = _HEAD.unpack_from(data)
        return LoggerProgress(last_step, bool(is_over), data[_HEAD.size :].decode(errors="replace"), bool(has_started))

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)


class _BundledLogger(NamedTuple):
    place: str
    package: str = ""  # that it needs
    extra: str = ""  # of bamboo-train, which brings it
    argument: str = ""  # the form of what may follow its name and a colon
    expected: str = ""  # the same in words


LOGGERS = {
    "csv": _BundledLogger("loggers:CsvLogger"),
    "tensorboard": _BundledLogger("loggers:TensorboardLogger", "tensorboard", "tensorboard"),
    "wandb": _BundledLogger("loggers:WandbLogger", "wandb", "wandb"),
    "mlflow": _BundledLogger("loggers:MlflowLogger", "mlflow", "mlflow"),
    "prometheus": _BundledLogger(
        "prometheus:PrometheusLogger",
        argument=r"[1-9][0-9]{0,4}|.*\.prom",
        expected="prometheus, prometheus:FILE.prom or prometheus:PORT",
    ),
    "otel": _BundledLogger("otel:OtelLogger", "opentelemetry.exporter.otlp.proto.http", "otel"),
    "kubeflow": _BundledLogger("kubeflow:KubeflowLogger"),
}


def logger_problems(text: str) -> list[Problem]:
    """Returns the problems with the loggers of a job: unknown names, and packages that are not installed."""
    problems = []
    for name in logger_names(text):
        bundled, argument = _bundled(name)
        if bundled is None and not FACTORY.fullmatch(name):
            expected = f"{', '.join(LOGGERS)} or package.module:Class, with commas between several"
            problems.append(Problem("logger", expected, repr(name), nearest(name.partition(":")[0], LOGGERS)))
        elif bundled is not None and argument is not None and not re.fullmatch(bundled.argument or "a^", argument):
            problems.append(Problem("logger", bundled.expected or f"{name.partition(':')[0]} alone", repr(name)))
        elif bundled is not None and bundled.package and not _is_installed(bundled.package):
            hint = f"pip install 'bamboo-train[{bundled.extra}]'"
            problems.append(Problem("logger", f"the package {bundled.package}", repr(name), hint))
    return problems


def _bundled(name: str) -> tuple[_BundledLogger | None, str | None]:
    """Returns the bundled logger of this name and its argument, None without one; none for a user's class."""
    first, colon, argument = name.partition(":")
    return (None, None) if FACTORY.fullmatch(name) else (LOGGERS.get(first), argument if colon else None)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a package that it is in
        return False


def made_logger(name: str) -> object:
    """Returns a new logger of this name; a user's module or class may raise anything."""
    bundled, argument = _bundled(name)
    module_name, _, attribute = name.partition(":") if bundled is None else bundled.place.partition(":")
    if bundled is not None:
        module_name = f"{__package__}.{module_name}"
    elif (folder := os.getcwd()) not in sys.path:  # as workers look there
        sys.path.insert(0, folder)
    return getattr(importlib.import_module(module_name), attribute)(*filter(None, (argument,)))


View = TypeVar("View")

START_S, DRAIN_S = 60.0, 10.0
INTERRUPTED_S = 0.5
_SHARE, _AT_ONCE_S = 0.01, 0.2  # of a core's time, while steps are trained: on average, and beyond that
_POLL_S = 0.01
_TICKS = os.sysconf("SC_CLK_TCK")
_PROCESS = "engine.observers.observer_process"


@dataclass(slots=True)
class Observer:
    """One logger: its process, its progress, and whether its end was reported.

    `since` is the time when the first step was seen, and the CPU time of the process until then.
    """

    name: str
    process: subprocess.Popen[bytes]
    page: ProgressPage
    log: Path
    is_told: bool = False
    since: tuple[float, float] | None = None
    is_slowed: bool = False
    num_looks: int = 0  # since then

    def hold_back(self) -> None:
        """From now on allows a process that computes too much only idle time, in one of four looks."""
        if (computed_s := _computed_s(self.process.pid)) is None:
            return
        begun_s, before_s = self.since = self.since or (time.monotonic(), computed_s)
        if not self.is_slowed and computed_s - before_s > _AT_ONCE_S + _SHARE * (time.monotonic() - begun_s):
            self.is_slowed = True
            self._schedule(os.SCHED_IDLE, 19)
        if self.is_slowed:
            self.num_looks += 1
            self.process.send_signal(signal.SIGSTOP if self.num_looks % 4 else signal.SIGCONT)

    @property
    def is_starting(self) -> bool:
        """Whether its process is still importing and making the logger."""
        return self.process.poll() is None and not self.page.read().has_started

    def let_run(self) -> None:
        """Restores the usual share of the process, if the kernel allows that."""
        if self.is_slowed:
            self.process.send_signal(signal.SIGCONT)
            self._schedule(os.SCHED_OTHER, 0)

    def _schedule(self, policy: int, nice: int) -> None:
        group = f"/proc/{self.process.pid}/autogroup"  # with autogroups, the policy applies only within the session
        with contextlib.suppress(OSError), closing_fd(os.open(group, os.O_WRONLY)) as fd:
            os.write(fd, str(nice).encode())
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self.process.pid}/task"):
                os.sched_setscheduler(int(thread), policy, os.sched_param(0))


class Observers:
    """The loggers of one run; `say` gets a line about each one that ends too early."""

    def __init__(self, job: Job, events: Path, logs: Path, say: Callable[[str], None]):
        self._say = say
        self.observers = [_started(name, events, logs) for name in logger_names(job.logger)]

    def look(self) -> None:
        """Reports the error of each logger that has ended since the last look."""
        for observer in self.observers:
            if (
                not observer.is_told
                and observer.process.poll() is not None
                and not (progress := observer.page.read()).is_over
            ):
                observer.is_told = True
                why = progress.error or f"it ended with exit code {observer.process.returncode}"
                self._say(f"logger {observer.name} has ended, training continues: {why}; its output: {observer.log}")

    def watching(self, show: Callable[[View], None], trains: Callable[[View], bool]) -> Callable[[View], None]:
        """Returns a function that shows a view of the run, and looks; `trains` says whether a step is committed."""

        def watch(view: View) -> None:
            show(view)
            self.look()
            for observer in self.observers if trains(view) else ():
                observer.hold_back()

        return watch

    def finish(self, committed: int) -> tuple[dict[str, Any], ...]:
        """Waits for the loggers to finish, ends those that are late, and returns the progress of all."""
        begun_s, limit_s = time.monotonic(), DRAIN_S
        start_by_s = begun_s + START_S
        for observer in self.observers:
            observer.let_run()
        while any(observer.process.poll() is None for observer in self.observers):
            interrupts = present()
            if limit_s == DRAIN_S and interrupts is not None and interrupts.first is not None:
                limit_s = min(DRAIN_S, time.monotonic() - begun_s + INTERRUPTED_S)
            now_s = time.monotonic()
            if limit_s == DRAIN_S and now_s < start_by_s and any(each.is_starting for each in self.observers):
                begun_s = now_s
            if now_s > begun_s + limit_s:
                break
            time.sleep(_POLL_S)
        self.look()
        return tuple(self._end(observer, committed, limit_s) for observer in self.observers)

    def kill(self) -> None:
        """Ends all processes at once."""
        for observer in self.observers:
            observer.process.kill()
            observer.process.wait()
            observer.page.close()
        self.observers = []

    def _end(self, observer: Observer, committed: int, limit_s: float) -> dict[str, Any]:
        is_late = observer.process.poll() is None
        if is_late:
            observer.process.kill()
            observer.process.wait()
        progress = observer.page.read()
        error = progress.error
        if is_late:
            error = f"it took longer than {limit_s:.1f} s after the end of training"
            self._say(
                f"logger {observer.name} was ended: {error}; it has logged {progress.last_step + 1} of "
                f"{committed + 1} steps"
            )
        return {"logger": observer.name, "last_step": progress.last_step, "whole": progress.is_over, "error": error}


def _computed_s(pid: int) -> float | None:
    """Returns the CPU time of a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _started(name: str, events: Path, logs: Path) -> Observer:
    log = logs / ("logger-" + re.sub(r"[^\w.-]", ".", name) + ".log")
    page = ProgressPage.new()
    arguments = str(os.getpid()), name, str(events.resolve()), str(page.fd)
    with open(open_to_append(log), "ab") as file:
        process = subprocesses.start(subprocesses.module(_PROCESS, *arguments), fd=page.fd, log=file)
    return Observer(name, process, page, log)


@contextlib.contextmanager
def observing(job: Job, events: Path, logs: Path, say: Callable[[str], None]) -> Iterator[Observers]:
    """Runs the loggers of a job beside the block; they have ended after it."""
    observers = Observers(job, events, logs, say)
    try:
        yield observers
    finally:
        observers.kill()
