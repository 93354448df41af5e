"""The loggers of a run as processes beside its launcher: their start, their errors, and the wait at the end.

Rules: no thread of the launcher runs a logger, and the launcher never waits for one before the end of training. While
steps are trained, a logger that computes more than `_SHARE` of a core gets a quarter of the time that no other process
wants.
After the end it has `DRAIN_S` to take the rest, and `INTERRUPTED_S` of an interrupted run. The launcher says which
steps a logger has not taken, and why a logger has ended, and goes on: a logger decides no exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, TypeVar

from engine.core.checks.recoveries import Recovery, RecoveryLog
from engine.core.errors import Problem, nearest
from engine.core.history.process_records import TrainingEndedRecord
from engine.core.history.run_records import CommitRecord, GoRecord, JobRecord, Record, ValidationRecord
from engine.core.job.job import FACTORY, Job, logger_names
from engine.core.job.torch_parts import LR_SCHEDULES, learning_rate
from engine.files.atomic_write import open_to_append
from engine.files.events_file import GrowingEvents
from engine.observers import loggers
from engine.observers.loggers import RecoveryDone, StepDone, TrainingDone, ValidationDone
from engine.runtime.process import subprocesses
from engine.runtime.process.interrupts import present

# Follows the records of a run, and calls a logger for each committed step, validation and recovery.


class LoggerFeed:
    """A logger and the events of its run; a method that the logger lacks is not called.

    `took` is called with each step that the logger has taken.
    """

    def __init__(self, logger: object, events: Path, took: Callable[[int], None] = lambda step: None):
        self.last_step = -1  # that the logger has taken
        self.is_over = False  # the logger has taken the end
        self._logger, self._took = logger, took
        self._folder = events.parent
        self._growing = GrowingEvents(events)
        self._log = RecoveryLog()
        self._before_ns = 0  # the last commit, or the begin of training

    def read_on(self) -> None:
        """Gives the logger all that was recorded since the last call, up to the end of training."""
        for record in () if self.is_over else self._growing.news():
            self._take(record)
            if self.is_over:
                return

    def _take(self, record: Record) -> None:
        recoveries = tuple(_told(each) for each in self._log.read(record))
        match record:
            case JobRecord():
                self._call("start", record.job, self._folder)
            case GoRecord():
                self._before_ns = self._before_ns or record.at_ns
            case CommitRecord():
                for each in recoveries:
                    self._call("recovery", each)
                self._call("step", self._step(record, recoveries))
                self._before_ns, self.last_step = record.at_ns, record.step
                self._took(record.step)
            case ValidationRecord():
                figures = record.loss, record.metrics, _wall_s(record.at_ns)
                self._call("validation", ValidationDone(record.step, record.name, record.samples, *figures))
            case TrainingEndedRecord():
                history = self._log.history
                steps, at_s = history.committed + 1, _wall_s(record.at_ns)
                self._call("finish", TrainingDone(record.outcome, record.exit_code, steps, history.error, at_s))
                self.is_over = True

    def _step(self, record: CommitRecord, recoveries: tuple[RecoveryDone, ...]) -> StepDone:
        job, lr = self._log.history.job, None
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
        )

    def _call(self, name: str, *values: object) -> None:
        method = getattr(self._logger, name, None)
        if method is not None:
            method(*values)


def _told(recovery: Recovery) -> RecoveryDone:
    stall = recovery.stall
    workers = tuple(each.worker for each in recovery.verdict)
    stall_ms = None if stall is None else stall.least_ns / 1e6
    return RecoveryDone(recovery.step, workers, recovery.rung, stall_ms, recovery.lost_steps, str(recovery))


def _wall_s(at_ns: int) -> float:
    """Returns a time of the host's monotonic clock as seconds since 1970."""
    return time.time() - (time.monotonic_ns() - at_ns) / 1e9


# The progress of a logger, in memory that its process and the launcher share: the last step, the end, an error.
_HEAD = Struct("<qq")  # the last step, and whether the logger has ended
_MOST_OF_TEXT = 1_000


class LoggerProgress(NamedTuple):
    """The last step that a logger has taken, whether it has taken the end, and the words of its error, or empty."""

    last_step: int = -1
    is_over: bool = False
    error: str = ""


class ProgressPage:
    """A piece of memory behind a descriptor; the writer may be killed at any time."""

    def __init__(self, fd: int):
        self.fd = fd

    @staticmethod
    def new() -> ProgressPage:
        """Returns an empty one."""
        slate = ProgressPage(os.memfd_create("bamboo-logger"))
        slate.write(LoggerProgress())
        return slate

    def write(self, progress: LoggerProgress) -> None:
        """Replaces the progress."""
        text = progress.error.encode(errors="replace")[:_MOST_OF_TEXT]
        os.pwrite(self.fd, _HEAD.pack(progress.last_step, progress.is_over) + text, 0)

    def read(self) -> LoggerProgress:
        """Returns the progress."""
        data = os.pread(self.fd, _HEAD.size + _MOST_OF_TEXT, 0)
        last_step, is_over = _HEAD.unpack_from(data)
        return LoggerProgress(last_step, bool(is_over), data[_HEAD.size :].decode(errors="replace"))

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)


# The loggers that a job can name: csv, tensorboard, wandb, mlflow, or a class of the user's.
class _BundledLogger(NamedTuple):
    attribute: str
    package: str = ""  # that it needs
    extra: str = ""  # of bamboo-train, which brings it


LOGGERS = {
    "csv": _BundledLogger("CsvLogger"),
    "tensorboard": _BundledLogger("TensorboardLogger", "tensorboard", "tensorboard"),
    "wandb": _BundledLogger("WandbLogger", "wandb", "wandb"),
    "mlflow": _BundledLogger("MlflowLogger", "mlflow", "mlflow"),
}


def logger_problems(text: str) -> list[Problem]:
    """Returns the problems with the loggers of a job: unknown names, and packages that are not installed."""
    found = []
    for name in logger_names(text):
        shipped = LOGGERS.get(name)
        if shipped is None and not FACTORY.fullmatch(name):
            expected = f"{', '.join(LOGGERS)} or package.module:Class, with commas between several"
            found.append(Problem("logger", expected, repr(name), nearest(name, LOGGERS)))
        elif shipped is not None and shipped.package and importlib.util.find_spec(shipped.package) is None:
            hint = f"pip install 'bamboo-train[{shipped.extra}]', or pip install {shipped.package}"
            found.append(Problem("logger", f"the package {shipped.package}", repr(name), hint))
    return found


def made_logger(name: str) -> object:
    """Returns a new logger of this name; an import or a class of the user's may raise anything."""
    if (shipped := LOGGERS.get(name)) is not None:
        return getattr(loggers, shipped.attribute)()
    module_name, _, attribute = name.partition(":")
    if (folder := os.getcwd()) not in sys.path:  # as workers look there
        sys.path.insert(0, folder)
    return getattr(importlib.import_module(module_name), attribute)()


View = TypeVar("View")

DRAIN_S = 10.0
INTERRUPTED_S = 0.5
_SHARE, _AT_ONCE_S = 0.01, 0.2  # of a core's time, while steps are trained: on average, and beyond that
_POLL_S = 0.01
_TICKS = os.sysconf("SC_CLK_TCK")
_PROCESS = "engine.observers.observer_process"


@dataclass(slots=True)
class Observer:
    """One logger: its process, its progress, and whether its end was told.

    `since` has the time at which the first step was seen, and the time that the process had computed until then.
    """

    name: str
    process: subprocess.Popen[bytes]
    slate: ProgressPage
    log: Path
    is_told: bool = False
    since: tuple[float, float] | None = None
    is_slowed: bool = False
    num_looks: int = 0  # since then

    def hold_back(self) -> None:
        """Gives the process only idle time from now on if it computes too much, and that in one of four looks."""
        if (computed_s := _computed_s(self.process.pid)) is None:
            return
        begun_s, before_s = self.since = self.since or (time.monotonic(), computed_s)
        if not self.is_slowed and computed_s - before_s > _AT_ONCE_S + _SHARE * (time.monotonic() - begun_s):
            self.is_slowed = True
            self._schedule(os.SCHED_IDLE, 19)
        if self.is_slowed:
            self.num_looks += 1
            self.process.send_signal(signal.SIGSTOP if self.num_looks % 4 else signal.SIGCONT)

    def let_run(self) -> None:
        """Gives the process its usual share again, where the kernel lets this user do that."""
        if self.is_slowed:
            self.process.send_signal(signal.SIGCONT)
            self._schedule(os.SCHED_OTHER, 0)

    def _schedule(self, policy: int, nice: int) -> None:
        with contextlib.suppress(OSError):  # where sessions share the time, the policy counts inside of one only
            fd = os.open(f"/proc/{self.process.pid}/autogroup", os.O_WRONLY)
            try:
                os.write(fd, str(nice).encode())
            finally:
                os.close(fd)
        with contextlib.suppress(OSError):
            for each in os.listdir(f"/proc/{self.process.pid}/task"):
                os.sched_setscheduler(int(each), policy, os.sched_param(0))


class Observers:
    """The loggers of one run; `say` gets a line about each that ends too early."""

    def __init__(self, job: Job, events: Path, logs: Path, say: Callable[[str], None]):
        self._say = say
        self._observers = [_started(name, events, logs) for name in logger_names(job.logger)]

    def look(self) -> None:
        """Tells the error of each logger that has ended since the last look."""
        for each in self._observers:
            if not each.is_told and each.process.poll() is not None and not (progress := each.slate.read()).is_over:
                each.is_told = True
                why = progress.error or f"it ended with exit code {each.process.returncode}"
                self._say(f"logger {each.name} has ended, training goes on: {why}; its output: {each.log}")

    def watching(self, show: Callable[[View], None], trains: Callable[[View], bool]) -> Callable[[View], None]:
        """Returns a function that shows a view of the run, and looks; `trains`: whether a step is committed."""

        def watch(view: View) -> None:
            show(view)
            self.look()
            for each in self._observers if trains(view) else ():
                each.hold_back()

        return watch

    def finish(self, committed: int) -> tuple[dict[str, Any], ...]:
        """Waits until the loggers have taken the end, ends the others, and returns the words about all of them."""
        begun_s, limit_s = time.monotonic(), DRAIN_S
        for each in self._observers:
            each.let_run()
        while any(each.process.poll() is None for each in self._observers):
            if limit_s == DRAIN_S and _is_interrupted():
                limit_s = min(DRAIN_S, time.monotonic() - begun_s + INTERRUPTED_S)
            if time.monotonic() > begun_s + limit_s:
                break
            time.sleep(_POLL_S)
        self.look()
        return tuple(self._end(each, committed, limit_s) for each in self._observers)

    def kill(self) -> None:
        """Ends all processes at once."""
        for each in self._observers:
            each.process.kill()
            each.process.wait()
            each.slate.close()
        self._observers = []

    def _end(self, observer: Observer, committed: int, limit_s: float) -> dict[str, Any]:
        is_late = observer.process.poll() is None
        if is_late:
            observer.process.kill()
            observer.process.wait()
        progress = observer.slate.read()
        error = progress.error
        if is_late:
            error = f"it took longer than {limit_s:.1f} s after the end of training"
            self._say(
                f"logger {observer.name} was ended: {error}; it has logged {progress.last_step + 1} of "
                f"{committed + 1} steps"
            )
        return {"logger": observer.name, "last_step": progress.last_step, "whole": progress.is_over, "error": error}


def _computed_s(pid: int) -> float | None:
    """Returns the time that a process has computed; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _is_interrupted() -> bool:
    interrupts = present()
    return interrupts is not None and interrupts.first is not None


def _started(name: str, events: Path, logs: Path) -> Observer:
    log = logs / f"logger-{name.replace(':', '.')}.log"
    slate = ProgressPage.new()
    arguments = str(os.getpid()), name, str(events.resolve()), str(slate.fd)
    with open(open_to_append(log), "ab") as file:
        process = subprocesses.start(subprocesses.module(_PROCESS, *arguments), fd=slate.fd, log=file)
    return Observer(name, process, slate, log)


@contextlib.contextmanager
def observing(job: Job, events: Path, logs: Path, say: Callable[[str], None]) -> Iterator[Observers]:
    """Runs the loggers of a job beside the block; they have ended after it."""
    observers = Observers(job, events, logs, say)
    try:
        yield observers
    finally:
        observers.kill()
