"""Follows the records of a run, and calls a logger for each committed step, validation and recovery."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from engine.core.checks.recovery_log import RecoveryLog
from engine.core.checks.recovery_times import Recovery
from engine.core.config.lr_schedule import LR_SCHEDULES, learning_rate
from engine.core.history.process_records import TrainingEndedRecord
from engine.core.history.record import Record
from engine.core.history.run_records import CommitRecord, GoRecord, JobRecord, ValidationRecord
from engine.files.growing_events import GrowingEvents
from engine.observers.logger import RecoveryDone, StepDone, TrainingDone, ValidationDone


class Following:
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
