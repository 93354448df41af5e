"""How the process of each worker ended, by the records of its run.

Rule: a worker that a verdict puts out, or whose end was not expected, is dead. A worker that left with notice has left.
A worker that told its last figures has finished. The launcher stopped the others.
"""

from __future__ import annotations

from typing import Literal

from engine.core.exclusion import Cause
from engine.core.history.process_records import ExitRecord, WaitingRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import EpochRecord, FinishedRecord, NoticeRecord

WorkerEnd = Literal["dead", "left", "finished", "stopped"]


def worker_ends(history: RunHistory) -> dict[int, WorkerEnd]:
    """Returns the end of each worker whose process has ended."""
    out = {each.worker: each for epoch in history.of(EpochRecord) for each in epoch.verdict}
    noticed = {each.of for each in history.of(NoticeRecord)}
    not_taken_in = {each.of for each in history.of(WaitingRecord) if each.lost}
    lost = {worker for worker, each in out.items() if each.is_loss} | not_taken_in - noticed
    left = {worker for worker, each in out.items() if each.cause is Cause.LEFT} | not_taken_in & noticed
    finished = {each.of for each in history.of(FinishedRecord)}
    ends: dict[int, WorkerEnd] = {}
    for each in history.of(ExitRecord):
        if not each.expected or each.of in lost:
            ends[each.of] = "dead"
        elif each.of in left:
            ends[each.of] = "left"
        else:
            ends[each.of] = "finished" if each.of in finished else "stopped"
    return ends
