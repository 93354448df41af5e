"""The fault-free twin of a run: the same training without faults and redundancy; and the comparison with it.

Rules: only steps with hashes in both runs are compared. An earlier twin may be used again if all inputs of its bits are
known and the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from engine.core.checks.trajectory import TrajectoryRow, first_difference
from engine.core.config.bit_fields import bit_facts, cheapest, own_code
from engine.core.config.job import Job
from engine.core.history.process_records import ExitRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CommitRecord, EpochRecord, FaultRecord
from engine.core.history.verdict_records import ComparisonRecord

# The data that bamboo ships. The user's files count by their hashes; a factory may read anything.
BUILT_IN_DATA = frozenset({"auto", "text", "digits", "synthetic"})


def twin_of(job: Job) -> Job:
    """Returns the job of the twin: the options that do not change bits have their cheapest values."""
    return cheapest(job)


def fingerprint(
    job: Job, facts: Mapping[str, object], sources: str, files: Sequence[tuple[str, int, str]] = ()
) -> str | None:
    """Returns a name (hex) for the trajectory of the twin of `job`, or None if it must not be used again.

    `facts` describe the host; `sources` is a hash of bamboo's source code. `files` are those of the data: (name, size,
    SHA-256).
    """
    if own_code(job) or not (files or job.data in BUILT_IN_DATA):
        return None
    known = {"job": asdict(twin_of(job)), "facts": bit_facts(facts), "sources": sources, "files": files}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def compare(rows: Iterable[TrajectoryRow], twin: Iterable[TrajectoryRow], history: RunHistory) -> ComparisonRecord:
    """Returns the comparison of the rows of a run, which has this history, with the rows of its twin."""
    rows, twin = list(rows), list(twin)
    steps = {row.step for row in rows} & {row.step for row in twin}
    return ComparisonRecord(
        compared=len(steps),
        steps=history.job.steps,
        last_step=max(steps, default=-1),
        difference=first_difference(
            [row for row in rows if row.step in steps], [row for row in twin if row.step in steps]
        ),
        disturbed=disturbed_step(history),
    )


def disturbed_step(history: RunHistory) -> int | None:
    """Returns the step in which the first fault struck or the first worker was lost; None in a run without either.

    The hashes of earlier steps are from before that. After a commit, a worker may still be inside its optimizer step.
    """
    committed = 0
    for record in history.records:
        match record:
            case CommitRecord():
                committed = record.step
            case FaultRecord():
                return record.step if record.action else committed
            case EpochRecord() if record.verdict:
                return committed
            case ExitRecord() if not record.expected:
                return committed
    return None
