"""How the process of each worker ended, by the records of its run.

Rule: a worker that a verdict puts out, or whose end was not expected, is dead. A worker that left with notice has left.
A worker that told its last figures has finished. The launcher stopped the others. A number is used again when all
workers are started again; then only the records since the last start of a worker count.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from engine.core.exclusion import Cause
from engine.core.history.elastic_records import CrampedRecord
from engine.core.history.process_records import ExitRecord, StartedRecord, WaitingRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import EpochRecord, FinishedRecord, NoticeRecord, RaisedRecord, StaysRecord

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
        each.worker: each
        for epoch in history.of(EpochRecord)
        for each in epoch.verdict
        if each.worker not in starts or epoch.at_ns >= starts[each.worker].at_ns
    }
    noticed = {each.of for each in since_start(history, NoticeRecord)}
    not_taken_in = {each.of for each in since_start(history, WaitingRecord) if each.lost}
    lost = {worker for worker, each in out.items() if each.is_loss} | not_taken_in - noticed
    left = {worker for worker, each in out.items() if each.cause is Cause.LEFT} | not_taken_in & noticed
    finished = {each.of for each in since_start(history, FinishedRecord)}
    ends: dict[int, WorkerEnd] = {}
    for each in since_start(history, ExitRecord):
        if not each.expected or each.of in lost:
            ends[each.of] = "dead"
        elif each.of in left:
            ends[each.of] = "left"
        else:
            ends[each.of] = "finished" if each.of in finished else "stopped"
    return ends
