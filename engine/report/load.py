"""Reads the events of a run into tables.

The public entry for programs that use the tables:

    from pathlib import Path
    from engine.files.events_file import read_history
    from engine.report.load import load
    run = load(read_history(Path("results/latest/events.jsonl")))
    run.recovery, run.steps, run.workers, run.actions   # pandas data frames

Rule: tables come from events.jsonl and the folder steps alone. The weights are verified with a proof, which takes all
the evidence of a run folder; without one they are shown as not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from engine.codec.records import RECORDS
from engine.core.checks.moves import moves_in_words
from engine.core.checks.proof import UNREAD, Proof
from engine.core.exclusion import in_words
from engine.core.history.process_records import DeadlyRecord, ExitRecord, HostRecord, TwinRecord
from engine.core.history.run_history import RunHistory, gaps, left_out_steps
from engine.core.history.run_records import (
    EpochRecord,
    FaultRecord,
    PartitionRecord,
    RaisedRecord,
    ScenarioRecord,
    StampedRecord,
    kind_of,
)
from engine.core.history.step_files import span_of
from engine.core.job.job import Job
from engine.core.texts import counted, numbered
from engine.report.actions import MOST_ACTIONS, actions_of
from engine.report.judgement import Judgement, checks_table, judgement_of, outcome_table
from engine.report.tables import (
    evaluations_table,
    exposure_table,
    how_it_ended,
    loads_in_words,
    memory_table,
    norms_table,
    recovery_table,
    samples_table,
    steps_table,
    takeovers_table,
    tensors_table,
    workers_table,
)
from engine.report.time_table import StageFacts, TimeTables, stage_facts

# The exceptions that ended workers, in sentences.


def exceptions_in_words(raised: Sequence[RaisedRecord]) -> list[tuple[str, RaisedRecord]]:
    """Returns a sentence and the first record of each exception; workers that raised the same in a step share it."""
    by_text: dict[str, list[RaisedRecord]] = {}
    for each in raised:
        by_text.setdefault(each.exception.in_step(each.step), []).append(each)
    return [(f"{numbered('worker', [each.of for each in same])} {text}", same[0]) for text, same in by_text.items()]


# The observations and decisions of a run in the order of time: faults, exits, suspicions, verdicts, the end.
COLUMNS = ["at_ms", "what", "epoch", "worker", "text"]


def history_table(history: RunHistory) -> pd.DataFrame:
    """Returns one row per observation or decision; times in milliseconds since training began."""
    rows: list[tuple[Any, ...]] = []
    for epoch, record in history.in_epochs(*(RECORDS[kind] for kind in _TEXTS)):
        if isinstance(record, StampedRecord):
            at_ns = record.seen_ns if isinstance(record, ExitRecord) else record.at_ns
            kind, worker = kind_of(type(record)), getattr(record, "of", None)
            rows.append(((at_ns - history.begin_ns) / 1e6, kind, epoch, worker, _TEXTS[kind](record)))
    return pd.DataFrame(rows, columns=COLUMNS).astype({"worker": "Int64"}).sort_values("at_ms", kind="stable")


def verdict_text(epoch: EpochRecord) -> str:
    """Returns the workers that an epoch excludes, and the reason of the epoch; reports have their last actions."""
    out = "; ".join(f"worker {each.worker} {each.how}" for each in epoch.verdict)
    return f"{out} ({epoch.reason})" if out and epoch.reason not in in_words(epoch.verdict) else out or epoch.reason


_TEXTS: dict[str, Callable[[Any], str]] = {
    "fault": lambda record: f"injected {record.fault}",
    "notice": lambda record: f"gave notice, {record.grace_s:g} s",
    "pace": lambda record: f"after step {record.step}: {record.why}",
    "policy": lambda record: f"{record.asked}: {record.why}",
    "deadly": lambda record: str(record.text),
    "cramped": lambda record: str(record.why or "has memory for a slot, and may join"),
    "way_out": lambda record: str(record.text),
    "stays": lambda record: str(record.text),
    "suspicion": lambda record: str(record.text),
    "raised": lambda record: str(record.exception.in_step(record.step)),
    "exit": how_it_ended,
    "epoch": verdict_text,
    "go": lambda record: "training continues" if record.epoch > 1 else "training begins",
    "interrupt": lambda record: str(record.signal),
    "store_ended": lambda record: "the coordinator's store has ended",
    "fork_server_ended": lambda record: f"the fork server (pid {record.child}) has ended; training no longer needs it",
    "stopped_early": lambda record: str(record.why),
    "cut_short": lambda record: f"after the last commit: {record.reason}",
    "restart": lambda record: f"{record.reason}; all workers are restarted",
    "killed": lambda record: str(record.why),
    "left_behind": lambda record: f"pid {record.child} survived SIGKILL",
    "failed": lambda record: str(record.error),
    "training_ended": lambda record: f"training: {record.outcome}, exit code {record.exit_code}",
    "comparing": lambda record: "comparing with the twin",
    "comparison": lambda record: str(record.unproven_text),
    "not_compared": str,
    "verdict": lambda record: f"{record.result}, {record.request or 'the run'}",
    "ended": lambda record: f"{record.outcome}, exit code {record.exit_code}",
}

TABLES = (
    *("recovery", "steps", "workers", "actions", "checks", "outcome", "samples", "evaluations", "norms", "memory"),
    "tensors",
    *("time", "stages", "edges"),
)
PROVED = frozenset({"checks", "outcome"})  # of these: they say what the evidence proves about the weights
_SHARED = "Workers may have shared a GPU (--share-gpu): they take turns there, so its times say little."


@dataclass(frozen=True, slots=True, eq=False)
class RunTables:
    """One run as tables; ``_ms`` times count from `origin_ns`, ``_ns`` times are of the host's monotonic clock."""

    name: str
    job: Job
    judgement: Judgement
    error: str
    origin_ns: int
    end_ms: float
    faults: tuple[str, ...]
    recovery: pd.DataFrame
    steps: pd.DataFrame
    evaluations: pd.DataFrame
    norms: pd.DataFrame
    workers: pd.DataFrame
    actions: pd.DataFrame
    bars: pd.DataFrame  # of each worker, step and epoch: begin, end and busy time
    checks: pd.DataFrame
    outcome: pd.DataFrame
    history: pd.DataFrame
    exposure: pd.DataFrame
    takeovers: pd.DataFrame
    memory: pd.DataFrame  # of the workers' GPUs
    twin_loss: Mapping[int, float]  # by step; empty if the run was not compared with a twin
    scenario: ScenarioRecord | None  # of `bamboo inject`
    raised: tuple[RaisedRecord, ...]  # the exceptions that ended workers, in the order of time
    host: HostRecord | None  # None if the run was not started by a command
    gaps: tuple[str, ...] = ()  # the parts of the record that are missing, in sentences
    not_kept: str = ""  # in words, that the last checkpoint was not kept
    num_samples: int = 0  # in the training set; 0 for data without limit
    moves: tuple[str, ...] = ()  # the slow workers, the wishes of the policy and each hand-over, in sentences
    loads: tuple[str, ...] = ()  # the loads of GPUs, in sentences
    deadly: tuple[str, ...] = ()  # the hosts that could not be lost, and from which epoch on, in sentences
    tensors: pd.DataFrame = field(default_factory=pd.DataFrame)
    chores: pd.DataFrame = field(default_factory=pd.DataFrame)
    epochs: tuple[EpochRecord, ...] = ()
    facts: StageFacts = field(default_factory=StageFacts)
    goes_on: bool = False  # its launcher ran when the events were read; no record says so

    @property
    def samples(self) -> pd.DataFrame:
        """The ledger of samples; made when it is asked for, because it has a row for every microbatch."""
        return samples_table(self.job, self.steps["step"], self.num_samples)

    @property
    def times(self) -> TimeTables:
        """The tables of time; made when they are asked for, because they run each program dry."""
        return self.times_from(0)

    def times_from(self, step: int) -> TimeTables:
        """Returns the tables of time of a step and those behind it."""
        actions, chores = (table[table["step"] >= step] for table in (self.actions, self.chores))
        return TimeTables(actions, chores, self.job, self.epochs, self.facts)

    @property
    def time(self) -> pd.DataFrame:
        """Where the time of each worker went, by step."""
        return self.times.time()

    @property
    def stages(self) -> pd.DataFrame:
        """Where the time went, by slot."""
        return self.times.stages()

    @property
    def edges(self) -> pd.DataFrame:
        """The activations and gradients that workers sent, by sender, receiver and border."""
        return self.times.edges()

    @property
    def remarks(self) -> tuple[str, ...]:
        """All that a reader of its times should know, and the moves, in sentences."""
        shares = self.job.share_gpu and self.job.device == "cuda"
        return (*([_SHARED] if shares else []), *self.loads, *self.deadly, *self.moves)

    def table(self, name: str) -> pd.DataFrame:
        """Returns the table of a name in `TABLES`, with the name of the run as first column."""
        table: pd.DataFrame = getattr(self, name).copy()
        table.insert(0, "run", self.name)
        return table


def load(
    history: RunHistory, name: str = "", most_actions: int | None = MOST_ACTIONS, proof: Proof = UNREAD
) -> RunTables:
    """Returns the tables of a run and its `proof`; of a longer run `most_actions` rows, near recoveries first."""
    origin_ns, steps, actions = history.begin_ns, steps_table(history), actions_of(history, most_actions)
    recovery = recovery_table(history, actions, steps)
    stamps = [each.at_ns for each in history.training_records if isinstance(each, StampedRecord)]
    # If training has ended, that is the last, whatever a damaged file of actions says.
    stamps += [*history.commits.at_ns[-1:], *([] if history.training_ended else [actions.sums.end_ns])]
    twin, partition, judgement = history.first(TwinRecord), history.first(PartitionRecord), judgement_of(history, proof)
    end_ms = max(0.0, (max(stamps, default=origin_ns) - origin_ns) / 1e6)
    return RunTables(
        name,
        history.job,
        judgement,
        history.error,
        origin_ns,
        end_ms,
        tuple(dict.fromkeys(each.fault for each in history.of(FaultRecord))),
        recovery,
        steps,
        evaluations_table(history),
        norms_table(history),
        workers_table(history, actions.sums, origin_ns),
        actions.table,
        actions.bars,
        checks_table(judgement),
        outcome_table(judgement),
        history_table(history),
        exposure_table(history.job, recovery, end_ms),
        takeovers_table(history),
        memory_table(history),
        dict(twin.losses) if twin else {},
        history.first(ScenarioRecord),
        tuple(history.of(RaisedRecord)),
        history.first(HostRecord),
        (*gaps(history), *_missing(history, actions.sums.unread)),
        history.not_kept,
        0 if partition is None else partition.samples,
        tuple(moves_in_words(history)),
        tuple(loads_in_words(history)),
        tuple(f"From epoch {epoch} on {each.text}." for epoch, each in history.in_epochs(DeadlyRecord)),
        tensors_table(history),
        actions.chores,
        tuple(history.epochs),
        stage_facts(history),
    )


def _missing(history: RunHistory, unread: int) -> list[str]:
    gaps = [f"{counted(unread, 'action')} could not be read"] if unread else []
    span, there = span_of(history.job), history.files.ranges().keys()
    out = left_out_steps(history)
    begun = history.commits.steps[0] if history.commits else 0
    firsts = (first for first in range(begun - begun % span, history.committed + 1, span) if first not in there)
    gone = [first for first in firsts if not any(begin <= first <= end for begin, end in out)]
    if not gone:
        return gaps
    steps = sum(min(span, history.committed + 1 - first) for first in gone)
    return [*gaps, f"the actions of {counted(steps, 'step')} from step {gone[0]} on are gone: no time includes them"]


def joined(runs: Sequence[RunTables], name: str) -> pd.DataFrame:
    """Returns one of the `TABLES` over one or more runs, with the name of the run as first column."""
    return pd.concat([run.table(name) for run in runs], ignore_index=True)
