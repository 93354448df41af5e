"""The status of a run, made from its history: for a run that has ended or has lost its store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.core.history.process_records import ExitRecord, FailedRecord, StartedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CommitRecord, EpochRecord, StaysRecord
from engine.core.membership.run_status import CANNOT_LEAVE, RunStatus, WorkerStatus
from engine.core.ownership import Slot, by_slot

ENDED = ("dead", "left")  # states of a worker whose process has ended
STARTING = "starting"  # the phase before the first epoch


def status_of_history(run_id: str, history: RunHistory) -> RunStatus:
    """Returns the status of a run after its last record."""
    ended = history.ended
    phase = ended.outcome if ended else "running" if history.epochs else STARTING
    epoch = history.epochs[-1].epoch if history.epochs else 0
    started = sorted(history.of(StartedRecord), key=lambda each: each.of)
    workers = tuple(_worker(each, history) for each in started)
    commits = history.of(CommitRecord)
    return RunStatus(
        run_id,
        phase,
        epoch,
        history.committed,
        history.job.steps,
        workers,
        tuple(_verdicts(history)),
        commits[-1].loss if commits else None,
    )


def _worker(started: StartedRecord, history: RunHistory) -> WorkerStatus:
    owned = [started.slots]
    for epoch in history.epochs:
        owners = by_slot(epoch.owners, history.job.stages)
        now = tuple(slot for slot, owner in owners.items() if owner == started.of)
        owned += [now] if now != owned[-1] else []
    before: tuple[Slot, ...] = owned[-2] if len(owned) > 1 else ()
    status = WorkerStatus(started.of, started.child, "", owned[-1], before)
    if (last := history.last_action.get(started.of)) is not None:
        status = replace(status, step=last.step, last_action=last.action)
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


def live_status(stored: RunStatus, recorded: RunStatus) -> RunStatus:
    """Returns the status in the store of a run, completed from its records.

    These have the workers that have ended, the last action of each worker, and the loss.
    """
    known = {each.worker: each for each in stored.workers}
    workers = {each.worker: each for each in recorded.workers} | {
        each.worker: replace(
            known[each.worker],
            step=each.step,
            last_action=each.last_action,
            state=each.state if each.state in ENDED else known[each.worker].state,
        )
        for each in recorded.workers
        if each.worker in known
    }
    workers = known | workers
    return replace(stored, workers=tuple(workers[each] for each in sorted(workers)), loss=recorded.loss)


def without_word(status: RunStatus) -> RunStatus:
    """Returns the status of a run after its launcher is gone without a last record: its workers are gone too."""
    workers = tuple(
        replace(each, state="gone") if each.state in ("in", CANNOT_LEAVE) else each for each in status.workers
    )
    return replace(status, phase="launcher gone", workers=workers)
