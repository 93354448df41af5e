"""The fault-free twin of a run: the same training without faults and redundancy; and the comparison with it.

Rules: only steps with hashes in both runs are compared. An earlier twin may be used again if all inputs of its bits are
known and the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from engine.core.checks.trajectory import TrajectoryRow, first_difference
from engine.core.config.job import Job

# The data that bamboo ships; the user's files and factories may change between two runs.
BUILT_IN_DATA = frozenset({"auto", "text", "digits", "synthetic"})
# The facts of a host that select the compute kernels, and so the bits.
_FACTS = ("python", "torch", "machine", "cpu", "isa")


@dataclass(frozen=True, slots=True)
class TwinComparison:
    """The comparison of a run with its twin; `difference` is None if all compared hashes are equal.

    A step without hashes in one of the runs is not compared: for instance, a worker died before it reported them.
    """

    num_steps: int
    last_step: int  # -1 if no step was compared
    difference: str | None


def twin_of(job: Job) -> Job:
    """Returns the job of the twin: the options that do not change bits have their cheapest values."""
    return replace(
        job,
        redundancy="none",
        redundancy_level=1,
        log_every=0,
        fsdp=0,
        check_pure=False,  # the run itself was checked
        validate_every=0,
        name="",
        results="",
    )


def fingerprint(job: Job, facts: Mapping[str, object], sources: str) -> str | None:
    """Returns a name (hex) for the trajectory of the twin of `job`, or None if it must not be used again.

    `facts` describe the host; `sources` is a hash of bamboo's source code.
    """
    if ":" in job.model or job.data not in BUILT_IN_DATA:
        return None
    known = {"job": asdict(twin_of(job)), "facts": {name: facts[name] for name in _FACTS}, "sources": sources}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def compare(rows: Iterable[TrajectoryRow], twin: Iterable[TrajectoryRow]) -> TwinComparison:
    """Returns the comparison of the rows of a run with the rows of its twin."""
    rows, twin = list(rows), list(twin)
    steps = {row.step for row in rows} & {row.step for row in twin}
    difference = first_difference(
        [row for row in rows if row.step in steps], [row for row in twin if row.step in steps]
    )
    if difference is not None:
        difference = difference.replace("in the first", "in this run").replace("in the second", "in its twin")
    return TwinComparison(len(steps), max(steps, default=-1), difference)
