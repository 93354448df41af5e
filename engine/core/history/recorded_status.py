"""The status of a run, made from its history: for a run that has ended or has lost its store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.core.history.process_records import ExitRecord, FailedRecord, StartedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import EpochRecord, StaysRecord
from engine.core.membership.run_status import CANNOT_LEAVE, RunStatus, WorkerStatus
from engine.core.ownership import Slot, by_slot

STARTING = "starting"  # the phase before the first epoch


def status_of_history(run_id: str, history: RunHistory) -> RunStatus:
    """Returns the status of a run after its last record."""
    ended = history.ended
    phase = ended.outcome if ended else "running" if history.epochs else STARTING
    epoch = history.epochs[-1].epoch if history.epochs else 0
    started = sorted(history.of(StartedRecord), key=lambda each: each.of)
    workers = tuple(_worker(each, history) for each in started)
    return RunStatus(run_id, phase, epoch, history.committed, history.job.steps, workers, tuple(_verdicts(history)))


def _worker(started: StartedRecord, history: RunHistory) -> WorkerStatus:
    owned = [started.slots]
    for epoch in history.epochs:
        owners = by_slot(epoch.owners, history.job.stages)
        now = tuple(slot for slot, owner in owners.items() if owner == started.of)
        owned += [now] if now != owned[-1] else []
    before: tuple[Slot, ...] = owned[-2] if len(owned) > 1 else ()
    status = WorkerStatus(started.of, started.child, "", owned[-1], before)
    for _, record in history.in_epochs(ExitRecord, StaysRecord):
        if isinstance(record, ExitRecord) and record.of == started.of:
            status = replace(status, state="left" if record.expected else "dead")
        elif isinstance(record, StaysRecord) and record.of == started.of:
            status = replace(status, state=CANNOT_LEAVE)
    return status


def _verdicts(history: RunHistory) -> Iterator[tuple[int, str]]:
    for epoch, record in history.in_epochs(EpochRecord, StaysRecord, FailedRecord):
        match record:
            case EpochRecord():
                yield epoch, record.reason
            case StaysRecord():
                yield epoch, f"worker {record.of} {record.text}"
            case FailedRecord():
                yield epoch, record.error


def without_word(status: RunStatus) -> RunStatus:
    """Returns the status of a run after its launcher is gone without a last record: its workers are gone too."""
    workers = tuple(
        replace(each, state="gone") if each.state in ("in", CANNOT_LEAVE) else each for each in status.workers
    )
    return replace(status, phase="launcher gone", workers=workers)
