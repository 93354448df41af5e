"""The fault-free twin of a run: the same training without faults and redundancy; and the comparison with it.

Rules: only steps with hashes in both runs are compared. An earlier twin may be used again if all inputs of its bits are
known and the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter

from engine.core.checks.trajectory import TrajectoryRow, first_difference
from engine.core.config.bit_fields import bit_facts, cheapest, own_code
from engine.core.config.job import Job
from engine.core.history.process_records import ExitRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CommitRecord, EpochRecord, FaultRecord
from engine.core.history.verdict_records import ComparisonRecord

Rows = list[TrajectoryRow]
Step = tuple[int, Rows]
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
    by_step = attrgetter("step")
    return compare_steps(in_steps(sorted(rows, key=by_step)), in_steps(sorted(twin, key=by_step)), history)


def in_steps(rows: Iterable[TrajectoryRow]) -> Iterator[Step]:
    """Yields the rows of one step after another; they must come in the order of steps."""
    return ((step, list(of)) for step, of in groupby(rows, key=attrgetter("step")))


def compare_steps(run: Iterator[Step], twin: Iterator[Step], history: RunHistory) -> ComparisonRecord:
    """Returns the comparison of a run with its twin, whose steps are read one by one: a long run has millions."""
    num_compared, last_step, difference = 0, -1, None
    for step, ours, theirs in _both(run, twin):
        num_compared, last_step = num_compared + 1, step
        difference = difference or first_difference(ours, theirs)
    return ComparisonRecord(
        compared=num_compared,
        steps=history.job.steps,
        last_step=last_step,
        difference=difference,
        disturbed=disturbed_step(history),
    )


def _both(run: Iterator[Step], twin: Iterator[Step]) -> Iterator[tuple[int, Rows, Rows]]:
    """Yields the steps that both have; reads each to its end."""
    ours, theirs = next(run, None), next(twin, None)
    while ours is not None or theirs is not None:
        if ours is not None and theirs is not None and ours[0] == theirs[0]:
            yield ours[0], ours[1], theirs[1]
            ours, theirs = next(run, None), next(twin, None)
        elif theirs is None or (ours is not None and ours[0] < theirs[0]):
            ours = next(run, None)
        else:
            theirs = next(twin, None)


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
