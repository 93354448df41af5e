"""The table of tensors: what a worker held for each of its slots by kind, beside the prediction of the memory model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pandas as pd

from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import (
    EpochRecord,
    FinishedRecord,
    PartitionRecord,
    PureCheckRecord,
    TensorsRecord,
)
from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes
from engine.core.job.tensor_model import BySlot, TensorBytes, predicted_tensors, residual_of
from engine.core.ownership import Ownership
from engine.core.program.build import build_program

_MIB = 2**20
_AT = ["worker", "step", "at", "pipeline", "stage", "role"]
_KINDS = [f"{kind}_mib" for kind in TensorBytes._fields]
_TOTALS = ["total_mib", "predicted_mib"]


def tensors_table(history: RunHistory) -> pd.DataFrame:
    """Returns one row per worker, step that another one differs from, moment (boundary, peak) and slot, in MiB.

    The role is owner or shadow. The prediction is that of a whole step of the epoch, for a run that has finished. It
    stands beside the last row of a worker in the epoch: earlier steps begin without moments, or belong to a recovery.
    """
    rows = list(_rows(history))
    kinds = dict.fromkeys(("worker", "step", "pipeline", "stage"), "int64") | dict.fromkeys(
        [*_KINDS, *_TOTALS], "float64"
    )
    return pd.DataFrame(rows, columns=[*_AT, *_KINDS, *_TOTALS]).astype(kinds)


def _rows(history: RunHistory) -> Iterator[list[Any]]:
    told = list(history.in_epochs(TensorsRecord))
    last = {(epoch, record.worker): record.step for epoch, record in told}
    facts, job, known = stage_bytes_of(history), history.job, dict[tuple[int, int], tuple[BySlot, BySlot]]()
    epochs = {each.epoch: each for each in history.epochs}
    for epoch, record in told:
        ownership = _ownership(job, epochs.get(epoch))
        if ownership is None:
            continue
        key = epoch, record.worker
        if key not in known:
            known[key] = _predicted(_as_in(job, epochs[epoch]), ownership, record.worker, facts)
        of_step = known[key] if record.step == last[key] else ({}, {})
        for at, rows, predicted in zip(("boundary", "peak"), (record.boundary, record.peak), of_step, strict=True):
            for pipeline, stage, *sizes in rows:
                slot, mib = (pipeline, stage), [size / _MIB for size in sizes]
                role = "owner" if ownership.owner(*slot) == record.worker else "shadow"
                expected = sum(predicted[slot]) / _MIB if slot in predicted else None
                yield [record.worker, record.step, at, *slot, role, *mib, sum(mib), expected]


def _as_in(job: Job, epoch: EpochRecord) -> Job:
    """Returns the job with the schedule of an epoch."""
    return replace(job, schedule=epoch.schedule or job.schedule)


def _ownership(job: Job, epoch: EpochRecord | None) -> Ownership | None:
    if epoch is None or len(epoch.owners) != job.pipelines * job.slots:
        return None
    return Ownership(job.grid, epoch.owners, epoch.shadows)


Facts = tuple[dict[int, StageBytes], dict[int, int]]  # the sizes of each stage, and of its residual


def stage_bytes_of(history: RunHistory) -> Facts:
    """Returns the sizes of the stages of a run, and the bytes of a microbatch in the stash of each, as far as known."""
    cuts = history.of(PartitionRecord)
    tried = {layer: sizes for each in history.of(PureCheckRecord) for layer, *sizes in each.residuals}
    sizes = {stage: StageBytes(*rest) for done in history.of(FinishedRecord) for stage, *rest in done.sizes}
    residuals = {}
    for stage, (first, end) in enumerate(pairwise((*cuts[-1].starts, len(cuts[-1].layers))) if cuts else ()):
        size = residual_of(history.job, range(first, end), {layer: of for layer, (of, _) in tried.items()})
        residuals[stage] = size + (tried[first][1] if first in tried else 0)
    return sizes, residuals


def _predicted(job: Job, ownership: Ownership, worker: int, facts: Facts) -> tuple[BySlot, BySlot]:
    sizes, residuals = facts
    if len(sizes) < job.slots or len(residuals) < job.slots or worker not in ownership.workers():
        return {}, {}
    program = build_program(job.schedule, ownership, job.redundancy, log_every=job.log_every)
    return predicted_tensors(job, program[worker], ownership, worker, sizes, residuals)
