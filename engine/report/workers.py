"""The table of workers: the first slots of each, its work and its end; the slots that it took over; its GPU."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from typing import Any

import pandas as pd

from engine.core.analysis.memory_model import StageBytes, WorkerBytes, worker_bytes
from engine.core.history.memory_records import LoadRecord, MemoryRecord
from engine.core.history.process_records import ExitRecord, StartedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import FinishedRecord, RaisedRecord
from engine.core.history.worker_ends import last_starts, since_start, worker_ends
from engine.core.ownership import Ownership, by_slot
from engine.report.action_arrays import Sums, Totals

_MIB = 2**20
_OF_GPU = ["allocated_mib", "reserved_mib", "predicted_mib"]
TAKEOVER_COLUMNS = ["from_ms", "pipeline", "stage", "before", "heir"]
_MEMORY = ["peak_memory_mib", "tensors_mib", "device_mib", "device_predicted_mib"]
_COLUMNS = ["worker", "pid", "slots", "state", "code", "seen_ns", *_MEMORY, "peak_stash"]


def workers_table(history: RunHistory, sums: Sums, origin_ns: int) -> pd.DataFrame:
    """Returns one row per worker; times in milliseconds since training began, memory in MiB.

    `tensors_mib` is the prediction of the memory model for the first epoch. `device_mib` is the peak of a GPU, with the
    prediction for the owners of that time.
    """
    rows: dict[int, dict[str, Any]] = {}
    for each in last_starts(history).values():
        slots = " ".join(f"{pipeline}.{stage}" for pipeline, stage in each.slots)
        rows[each.of] = {"worker": each.of, "pid": each.child, "slots": slots, "state": "running"}
    for worker, predicted in _predicted(history).items():
        if worker in rows:
            rows[worker]["tensors_mib"] = sum(predicted) / _MIB
    for worker, at_peak in _peaks(memory_table(history)).items():
        rows[worker] |= at_peak
    for done in since_start(history, FinishedRecord):
        peak_stash = max((peak for *_, peak in done.peak_stash), default=0)
        rows[done.of] |= {"peak_memory_mib": done.peak_memory_kib / 1024, "peak_stash": peak_stash, "state": "finished"}
    ended_with = since_start(history, RaisedRecord)
    raised = {each.of: (each.gpu or f"raised {each.error}").partition(":")[0] for each in ended_with}
    ends = worker_ends(history)
    for end in since_start(history, ExitRecord):
        how = ends[end.of]
        state = raised.get(end.of, how) if how in ("dead", "stopped") else how
        rows[end.of] |= {"state": state, "code": end.code, "seen_ns": end.seen_ns}
    table = pd.DataFrame([rows[worker] for worker in sorted(rows)], columns=_COLUMNS)
    table.insert(5, "end_ms", (table.pop("seen_ns").astype("float64") - origin_ns) / 1e6)
    table = table.astype({"code": "Int64", **dict.fromkeys(_MEMORY, "float64"), "peak_stash": "Int64"})
    totals = [sums.workers.get(worker, Totals()) for worker in table["worker"]]
    table["num_actions"] = pd.array([each.num_actions for each in totals], dtype="int64")
    table["busy_ms"] = pd.array([each.busy_ns / 1e6 for each in totals], dtype="float64")
    table["last_action"] = pd.array([each.last_action or None for each in totals], dtype="str")
    return table


def _predicted(history: RunHistory) -> dict[int, WorkerBytes]:
    """Returns the bytes of each worker in the first epoch; empty while the sizes of a stage are not known."""
    job, epochs = history.job, history.epochs
    sizes = {stage: StageBytes(*rest) for done in history.of(FinishedRecord) for stage, *rest in done.sizes}
    if not epochs or len(sizes) < job.slots:
        return {}
    ownership = Ownership(job.grid, epochs[0].owners, epochs[0].shadows)
    return {worker: worker_bytes(job, ownership, worker, sizes) for worker in ownership.workers()}


def memory_table(history: RunHistory) -> pd.DataFrame:
    """Returns the most memory of a worker's GPU in a step, and in those after it up to the next row of the worker."""
    rows = [
        (each.worker, each.step, each.allocated / _MIB, each.reserved / _MIB, each.predicted / _MIB or math.nan)
        for each in history.of(MemoryRecord)
    ]
    kinds = {"worker": "int64", "step": "int64", **dict.fromkeys(_OF_GPU, "float64")}
    return pd.DataFrame(rows, columns=list(kinds)).astype(kinds)


def _peaks(memory: pd.DataFrame) -> dict[int, dict[str, float]]:
    """Returns the peak of each worker's GPU, and what was predicted for that step."""
    rows = memory.loc[memory.groupby("worker")["allocated_mib"].idxmax()]
    return {
        each.worker: {"device_mib": each.allocated_mib, "device_predicted_mib": each.predicted_mib}
        for each in rows.itertuples()
    }


def loads_in_words(history: RunHistory) -> Iterator[str]:
    """Yields the load of each GPU over the run, where its host told it."""
    loads: dict[int, list[LoadRecord]] = {}
    for each in history.of(LoadRecord):
        loads.setdefault(each.gpu, []).append(each)
    for gpu, of in sorted(loads.items()):
        seconds = sum(each.samples for each in of)
        busy = sum(each.busy * each.samples for each in of) / seconds
        used = max(each.used for each in of) / _MIB
        yield f"GPU {gpu} computed for {busy:.0%} of {seconds} s, with at most {used:,.0f} MiB in use."


def takeovers_table(history: RunHistory) -> pd.DataFrame:
    """Returns one row per slot and change of its owner: since when, the owner before, and the heir."""
    owners = {slot: each.of for each in history.of(StartedRecord) for slot in each.slots}
    rows = []
    for epoch in history.epochs:
        for slot, heir in by_slot(epoch.owners, history.job.slots).items():
            before = owners.get(slot, heir)
            if heir != before:
                rows.append(((epoch.at_ns - history.begin_ns) / 1e6, *slot, before, heir))
            owners[slot] = heir
    return pd.DataFrame(rows, columns=TAKEOVER_COLUMNS).astype(dict.fromkeys(TAKEOVER_COLUMNS[1:], "int64"))


def how_it_ended(end: ExitRecord) -> str:
    """Returns ``SIGKILL`` or ``exit code 3``."""
    code = end.code
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"
