"""The tables of a run: its recoveries, steps, workers and tensors."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from engine.core.action import COMPUTE_OPS
from engine.core.checks.recoveries import PHASES, Recovery, Stall, recoveries
from engine.core.history.process_records import ExitRecord, RestartRecord, StartedRecord
from engine.core.history.run_history import RunHistory, last_starts, since_start, worker_ends
from engine.core.history.run_records import (
    EpochRecord,
    FaultRecord,
    FinishedRecord,
    LoadRecord,
    MemoryRecord,
    MovedRecord,
    NormsRecord,
    NoticeRecord,
    PartitionRecord,
    PureCheckRecord,
    RaisedRecord,
    TensorsRecord,
    UnconfirmedRecord,
    ValidationRecord,
)
from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes, WorkerBytes, worker_bytes
from engine.core.job.samples import first_position, samples_per_step, shares
from engine.core.job.tensor_model import BySlot, TensorBytes, predicted_tensors, residual_of
from engine.core.ownership import Ownership, by_slot
from engine.core.program.build import build_program
from engine.report.actions import Actions, Sums, Totals

# The table of commits, one row each, and the ledger of samples; a step that was lost and redone has two commits.
#
# Rules: a step lasts from the previous commit to its own; the first step lasts from the beginning of training. Times
# are milliseconds since training began, throughput is samples per second.

_LEDGER = ["step", "pipeline", "microbatch", "data_epoch", "first", "count"]


def steps_table(history: RunHistory) -> pd.DataFrame:
    """Returns step, epoch, time of commit, duration, losses, gradient norm and throughput of each commit."""
    commits = history.commits
    validated = history.of(ValidationRecord)
    origin_ns = history.begin_ns
    table = pd.DataFrame(
        {
            "step": np.array(commits.steps),
            "epoch": np.array(commits.epochs),
            "at_ns": np.array(commits.at_ns),
            "loss": np.array(commits.losses),
            "grad_norm": np.where(np.array(commits.grad_norms) < 0, np.nan, np.array(commits.grad_norms)),
        }
    )
    before_ns = table["at_ns"].shift(fill_value=origin_ns)
    duration_ms = (table["at_ns"] - before_ns) / 1e6
    table.insert(2, "commit_ms", (table["at_ns"] - origin_ns) / 1e6)
    table.insert(3, "duration_ms", duration_ms)
    firsts = {each.step: each for each in reversed(validated)}  # the first evaluation set of a step
    table["validation_loss"] = table["step"].map({step: each.loss for step, each in firsts.items()}).astype("float64")
    metrics = {step: next(iter(each.metrics.values())) for step, each in firsts.items() if each.metrics}
    table["validation_metric"] = table["step"].map(metrics).astype("float64")
    table["samples_per_s"] = samples_per_step(history.job) / (duration_ms.where(duration_ms > 0, np.nan) / 1e3)
    return table.drop(columns="at_ns")


def evaluations_table(history: RunHistory) -> pd.DataFrame:
    """Returns one row per evaluation set of a validation pass: its samples, its loss, and a column for each metric."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for record in history.of(ValidationRecord):  # a step that was redone has its last result
        row = {"step": record.step, "set": record.name, "samples": record.samples, "loss": record.loss}
        rows[record.step, record.name] = row | dict(record.metrics)
    kinds = {"step": "int64", "set": object, "samples": "int64", "loss": "float64"}
    return pd.DataFrame([*rows.values()], columns=None if rows else list(kinds)).astype(kinds)


def norms_table(history: RunHistory) -> pd.DataFrame:
    """Returns one row per layer and step with gradient norms: the number and the name of the layer, and its norm."""
    names = history.of(PartitionRecord)[-1].layers if history.of(PartitionRecord) else ()
    last = {each.step: each.norms for each in history.of(NormsRecord)}  # of a step that was redone
    rows = [
        (step, layer, names[layer] if layer < len(names) else "", norm)
        for step, norms in last.items()
        for layer, norm in norms
    ]
    kinds = {"step": "int64", "layer": "int64", "name": object, "grad_norm": "float64"}
    return pd.DataFrame(rows, columns=list(kinds)).astype(kinds)


def samples_table(job: Job, steps: Iterable[int], num_samples: int) -> pd.DataFrame:
    """Returns a row per microbatch and pass; `first` is the place of its first sample in the order of the pass."""
    rows = [
        (step, pipeline, microbatch, *share)
        for step in (sorted(set(steps)) if num_samples else ())
        for pipeline in range(job.pipelines)
        for microbatch in range(job.microbatches)
        for share in shares(first_position(job, step, pipeline, microbatch), job.microbatch_size, num_samples)
    ]
    return pd.DataFrame(rows, columns=_LEDGER, dtype="int64")


# The table of workers: the first slots of each, its work and its end; the slots that it took over; its GPU.
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
    for start in last_starts(history).values():
        slots = " ".join(f"{pipeline}.{stage}" for pipeline, stage in start.slots)
        rows[start.of] = {"worker": start.of, "pid": start.child, "slots": slots, "state": "running"}
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
        (peak.worker, peak.step, peak.allocated / _MIB, peak.reserved / _MIB, peak.predicted / _MIB or math.nan)
        for peak in history.of(MemoryRecord)
    ]
    kinds = {"worker": "int64", "step": "int64", **dict.fromkeys(_OF_GPU, "float64")}
    return pd.DataFrame(rows, columns=list(kinds)).astype(kinds)


def _peaks(memory: pd.DataFrame) -> dict[int, dict[str, float]]:
    """Returns the peak of each worker's GPU, and what was predicted for that step."""
    rows = memory.loc[memory.groupby("worker")["allocated_mib"].idxmax()]
    return {
        row.worker: {"device_mib": row.allocated_mib, "device_predicted_mib": row.predicted_mib}
        for row in rows.itertuples()
    }


def loads_in_words(history: RunHistory) -> Iterator[str]:
    """Yields the load of each GPU over the run, where its host recorded it."""
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


# The table of recoveries: a row per recovery, per death without a recovery, and per fault without either.
#
# Rules: `stall_ms` is how long training stalled; it is at most `stall_most_ms`, which differs only where `stall_bound`
# says "at least". A fault has a stall without a recovery only if it stopped a worker that then went on. The phases,
# whose sum is the pause, come from `recoveries`. The phase *heal* lasts from the first commit after the pause to the
# commit with which every slot has its shadows again. The clocks of several hosts are known within bounds:
# `uncertain_ms` is the largest error of a phase that spans hosts, and a phase shorter than its uncertainty is missing.
# Bytes are counted by their senders: `plan_bytes` in the plan's program, `heal_bytes` to the new shadows. Throughput
# before and after is the median of up to ten steps. Times are milliseconds; points in time such as `begin_ms` count
# from the beginning of training.
#
# The exposure window is the time in which only its owner had a live replica of some slot. With shadows or several
# pipelines, a job is exposed from the first sign of a failure until the new shadows are complete, or until its end. One
# pipeline without shadows is exposed all the time.

ALL_PHASES = (*PHASES, "merged", "heal")
PHASE_COLUMNS = [f"{phase}_ms" for phase in ALL_PHASES]
_TEXTS = ["outcome", "what", "verdict", "who", "slots", "step", "last_action"]
_TIMES = ["stall_ms", "stall_most_ms", *PHASE_COLUMNS, "pause_ms", "uncertain_ms"]
_COSTS = ["redone_actions", "samples_redone", "lost_steps", "plan_bytes", "heal_bytes"]
_THROUGHPUT = ["samples_per_s_before", "samples_per_s_during", "samples_per_s_after"]
_PLACES = ["begin_ms", "catch_up_ms", "resume_ms", "healed_ms"]
COLUMNS = [*_TEXTS, "stall_bound", *_TIMES, "rung", "heirs", *_COSTS, *_THROUGHPUT, "epoch", "reason", *_PLACES]
_WINDOW = 10  # steps
_EXPOSURE_COLUMNS = ["from_ms", "to_ms"]
AFTER_END = "after the end"  # no step was left
UNCONFIRMED = "unconfirmed"  # a fault without its sign
RESTARTED = "restarted"  # before the first commit: all workers were restarted
FROM_CHECKPOINT = "checkpoint"  # the rung of a recovery for which no worker held the state
# Outcomes in which training lost no worker: each worker stayed; the run noticed the fault and ended; the worker had
# given notice and left; training was over; no training was lost.
NO_WORKER_LOST = ("no worker lost", "noticed", "left", AFTER_END, RESTARTED, UNCONFIRMED)
_NO_TEXTS = dict.fromkeys(("verdict", "slots", "last_action", "stall_bound", "rung", "heirs"), "")
_FLOATS = [*_TIMES, *_THROUGHPUT, *_PLACES]


def recovery_table(history: RunHistory, actions: Actions, steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the recoveries of a run in the order of time; a point that was not reached is missing."""
    ended, origin_ns = history.training_ended is not None, history.begin_ns
    of_run = recoveries(history.records_of_recoveries)
    rows = []
    for recovery, following in zip(of_run, [*of_run[1:], None], strict=False):
        until_ns = following.begin_ns if following else None
        row = _row(recovery, history.job, actions.of_recoveries, steps, origin_ns, until_ns)
        unfinished = AFTER_END if recovery.after_end else "not recovered" if ended else "under way"
        outcome = unfinished if recovery.resume_ns is None else "recovered"
        rows.append(row | {"outcome": outcome} | _moved(recovery, history))
    rows += _without_recovery(history, of_run, actions.sums)
    if ended:
        rows += _without_death(history, {name for recovery in of_run for name in recovery.faults}, steps)
    table = pd.DataFrame(rows, columns=COLUMNS).sort_values("begin_ms", kind="stable", ignore_index=True)
    return table.astype(dict.fromkeys(_FLOATS, "float64") | dict.fromkeys([*_COSTS, "step", "epoch"], "Int64"))


def stalls_of(table: pd.DataFrame) -> list[Stall]:
    """Returns the stalls of some rows, without rows that have none."""
    return [
        Stall(round(least_ms * 1e6), None if pd.isna(most_ms) else round(most_ms * 1e6))
        for least_ms, most_ms in zip(table["stall_ms"], table["stall_most_ms"], strict=True)
        if not pd.isna(least_ms)
    ]


def _row(
    recovery: Recovery, job: Job, actions: pd.DataFrame, steps: pd.DataFrame, origin_ns: int, until_ns: int | None
) -> dict[str, Any]:
    times: dict[str, float | None] = {f"{phase}_ms": phase_ns / 1e6 for phase, phase_ns in recovery.reported_ns.items()}
    catch_up_ns = max(recovery.points_ns.values()) if "replay" in recovery.points_ns else None
    healed_ns = _healed_ns(recovery, actions, steps, origin_ns, until_ns)
    times |= {
        "begin_ms": _since(recovery.begin_ns, origin_ns),
        "catch_up_ms": _since(catch_up_ns, origin_ns),
        "resume_ms": _since(recovery.resume_ns, origin_ns),
        "healed_ms": _since(healed_ns, origin_ns),
        "heal_ms": _since(healed_ns, recovery.resume_ns),
        "pause_ms": _since(recovery.pause_ns, 0),
        "uncertain_ms": _since(max(recovery.uncertain_ns.values(), default=None), 0),
        "stall_ms": _since(recovery.stall.least_ns, 0) if recovery.stall else None,
        "stall_most_ms": _since(recovery.stall.most_ns, 0) if recovery.stall else None,
    }
    who = ", ".join(str(each.worker) for each in recovery.verdict)
    verdict = "; ".join(recovery.sentences) or "no worker was lost"
    faults = f"{', '.join(recovery.faults)}: " if recovery.faults else ""
    return {
        "what": faults + verdict,
        "verdict": verdict,
        "who": who,
        "slots": " ".join(f"{pipeline}.{stage}" for (pipeline, stage), _, _ in recovery.heirs),
        "step": recovery.step,
        "last_action": ", ".join(at[1] for at in recovery.last_actions.values() if at),
        "stall_bound": recovery.stall.bound if recovery.stall else "",
        "rung": recovery.rung,
        "heirs": ", ".join(dict.fromkeys(str(heir) for _, _, heir in recovery.heirs)),
        "lost_steps": recovery.lost_steps,
        "epoch": recovery.epoch,
        "reason": recovery.reason,
        **_redone(recovery, job, actions),
        **_throughput(steps, _since(recovery.begin_ns, origin_ns), _since(recovery.resume_ns, origin_ns)),
        **times,
    }


def _since(at_ns: int | None, from_ns: int | None) -> float | None:
    return None if at_ns is None or from_ns is None else (at_ns - from_ns) / 1e6


def _healed_ns(
    recovery: Recovery, actions: pd.DataFrame, steps: pd.DataFrame, origin_ns: int, until_ns: int | None
) -> int | None:
    """Returns the time of the commit with which the new shadows were complete; None if there was none."""
    if recovery.resume_ns is None:
        return None
    heals = actions[(actions["op"] == "HEAL") & (actions["end_ns"] > recovery.resume_ns)]
    if until_ns is not None:
        heals = heals[heals["end_ns"] < until_ns]
    if heals.empty:
        return None
    commits = steps[steps["step"] >= heals["step"].min()]["commit_ms"] * 1e6 + origin_ns
    later = commits[commits >= heals[heals["step"] == heals["step"].min()]["end_ns"].max()]
    return None if later.empty else round(later.iloc[0])


def _redone(recovery: Recovery, job: Job, actions: pd.DataFrame) -> dict[str, int]:
    """Returns the number of forwards and backwards that were redone, and of the samples they belonged to."""
    compute = actions["op"].isin([op.value for op in COMPUTE_OPS]) & actions["replayed"]
    until_ns = recovery.resume_ns or actions["end_ns"].max()
    again = actions[compute & (actions["start_ns"] >= recovery.begin_ns) & (actions["end_ns"] <= until_ns)]
    num_microbatches = len(again.drop_duplicates(["step", "pipeline", "microbatch"]))
    samples = num_microbatches * job.microbatch_size + recovery.lost_steps * samples_per_step(job)
    return {"redone_actions": len(again), "samples_redone": samples}


def _moved(recovery: Recovery, history: RunHistory) -> dict[str, int]:
    """Returns the bytes that workers sent: in every plan of the step, and to new shadows in the last epoch."""
    moved = history.of(MovedRecord)
    plan = [each.bytes for each in moved if (each.program, each.step) == ("plan", recovery.step)]
    heal = [each.bytes for each in moved if (each.program, each.epoch) == ("heal", recovery.epoch)]
    return {"plan_bytes": sum(plan), "heal_bytes": sum(heal)}


def _throughput(steps: pd.DataFrame, begin_ms: float | None, resume_ms: float | None) -> dict[str, float | None]:
    before = steps[steps["commit_ms"] <= begin_ms]["samples_per_s"].tail(_WINDOW).median()
    if resume_ms is None:
        return {"samples_per_s_before": before}
    # Times are rounded floats; half a microsecond is far less than the time between two commits.
    at = (steps["commit_ms"] - resume_ms).abs() < 5e-4
    return {
        "samples_per_s_before": before,
        "samples_per_s_during": steps[at]["samples_per_s"].mean(),
        "samples_per_s_after": steps[steps["commit_ms"] > resume_ms + 5e-4]["samples_per_s"].head(_WINDOW).median(),
    }


def _without_recovery(history: RunHistory, of_run: list[Recovery], sums: Sums) -> Iterator[dict[str, Any]]:
    """Yields a row of each worker that ended unexpectedly and outside all recoveries."""
    recovered = {out.worker for recovery in of_run for out in recovery.verdict}
    restarts = history.of(RestartRecord)
    for end in history.of(ExitRecord):
        if end.expected or end.of in recovered or any(_ended_by_restart(end, recovery) for recovery in of_run):
            continue
        last = sums.workers.get(end.of)
        yield {
            **_NO_TEXTS,
            "outcome": RESTARTED if any(each.at_ns >= end.seen_ns for each in restarts) else "not recovered",
            "what": f"worker {end.of} {'was killed' if end.code < 0 else 'ended'} ({how_it_ended(end)})",
            "who": str(end.of),
            "step": None if last is None else last.last_step,
            "last_action": "" if last is None else last.last_action,
            "rung": "none",
            "reason": history.error,
            "begin_ms": _since(end.seen_ns, history.begin_ns),
        }


def _ended_by_restart(end: ExitRecord, recovery: Recovery) -> bool:
    """Returns whether a worker ended in a recovery that resumed from a checkpoint, which needs no worker."""
    until_ns = recovery.resume_ns
    return recovery.is_from_checkpoint and until_ns is not None and recovery.begin_ns <= end.seen_ns <= until_ns


def _without_death(history: RunHistory, recovered: set[str], steps: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns a row for each fault of an ended run that is part of no recovery and killed no worker."""
    dead = {each.of for each in history.of(ExitRecord) if not each.expected}
    warned = {each.of for each in history.of(NoticeRecord)}
    struck: dict[str, list[FaultRecord]] = {}
    for strike in history.of(FaultRecord):
        if strike.fault not in recovered and strike.of not in dead:
            struck.setdefault(strike.fault, []).append(strike)
    others = (each for each in history.of(UnconfirmedRecord) if each.fault not in {*recovered, *struck})
    rows = [_unconfirmed(record, history) for record in others]
    for fault, victims in struck.items():
        first, who = victims[0], ", ".join(str(each.of) for each in victims)
        begin_ms = (first.at_ns - history.begin_ns) / 1e6
        commits = steps["commit_ms"][steps["commit_ms"] > begin_ms]
        rows.append(
            {
                **_NO_TEXTS,
                "outcome": "left" if first.of in warned else "noticed" if history.notice else "no worker lost",
                "what": f"{fault}: {first.do} of worker {who}",
                "who": who,
                "slots": " ".join(".".join(map(str, each.slot)) for each in victims if each.slot),
                "step": first.step,
                "reason": history.error,
                "begin_ms": begin_ms,
                **(_whole_stall(steps, begin_ms) if first.do == "stop" else {}),
                **_throughput(steps, begin_ms, None if commits.empty else float(commits.iloc[0])),
            }
        )
    return rows


def _unconfirmed(record: UnconfirmedRecord, history: RunHistory) -> dict[str, Any]:
    """Returns the row of a fault that struck no worker, or whose effect was not seen."""
    begin_ms = _since(record.at_ns, history.begin_ns)
    what = {"what": str(record), "who": "", "step": None, "reason": record.how, "begin_ms": begin_ms}
    return _NO_TEXTS | {"outcome": UNCONFIRMED} | what


def _whole_stall(steps: pd.DataFrame, begin_ms: float) -> dict[str, float]:
    """Returns the stall by a worker that was stopped and went on: its step less a usual step, if both exist."""
    usual_ms = steps[(steps["step"] > 0) & (steps["commit_ms"] <= begin_ms)]["duration_ms"].tail(_WINDOW).median()
    struck = steps[steps["commit_ms"] > begin_ms]["duration_ms"]
    if struck.empty or pd.isna(usual_ms):
        return {}
    stall_ms = max(0.0, float(struck.iloc[0] - usual_ms))
    return {"stall_ms": stall_ms, "stall_most_ms": stall_ms}


def exposure_table(job: Job, recovery: pd.DataFrame, end_ms: float) -> pd.DataFrame:
    """Returns the intervals of exposure; they do not overlap."""
    shadowed = job.redundancy != "none" and job.pipelines * job.stages > 1
    if not shadowed and job.pipelines == 1:
        return pd.DataFrame([(0.0, end_ms)], columns=_EXPOSURE_COLUMNS)
    intervals: list[tuple[float, float]] = []
    for row in recovery[(recovery["who"] != "") & ~recovery["outcome"].isin(NO_WORKER_LOST)].itertuples():
        until_ms = end_ms if pd.isna(row.healed_ms) else row.healed_ms
        if intervals and row.begin_ms <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], until_ms))
        else:
            intervals.append((row.begin_ms, until_ms))
    return pd.DataFrame(intervals, columns=_EXPOSURE_COLUMNS, dtype="float64")


# The table of tensors: what a worker held for each of its slots by kind, beside the prediction of the memory model.

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
    records = list(history.in_epochs(TensorsRecord))
    last = {(epoch, record.worker): record.step for epoch, record in records}
    facts, job, predictions = stage_bytes_of(history), history.job, dict[tuple[int, int], tuple[BySlot, BySlot]]()
    epochs = {each.epoch: each for each in history.epochs}
    for epoch, record in records:
        ownership = _ownership(job, epochs.get(epoch))
        if ownership is None:
            continue
        key = epoch, record.worker
        if key not in predictions:
            of_epoch = replace(job, schedule=epochs[epoch].schedule or job.schedule)
            predictions[key] = _predicted_tensors(of_epoch, ownership, record.worker, facts)
        of_step = predictions[key] if record.step == last[key] else ({}, {})
        for at, rows, predicted in zip(("boundary", "peak"), (record.boundary, record.peak), of_step, strict=True):
            for pipeline, stage, *sizes in rows:
                slot, mib = (pipeline, stage), [size / _MIB for size in sizes]
                role = "owner" if ownership.owner(*slot) == record.worker else "shadow"
                expected = sum(predicted[slot]) / _MIB if slot in predicted else None
                yield [record.worker, record.step, at, *slot, role, *mib, sum(mib), expected]


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


def _predicted_tensors(job: Job, ownership: Ownership, worker: int, facts: Facts) -> tuple[BySlot, BySlot]:
    sizes, residuals = facts
    if len(sizes) < job.slots or len(residuals) < job.slots or worker not in ownership.workers():
        return {}, {}
    program = build_program(job.schedule, ownership, job.redundancy, log_every=job.log_every, copy_time=job.copy_time)
    return predicted_tensors(job, program[worker], ownership, worker, sizes, residuals)
