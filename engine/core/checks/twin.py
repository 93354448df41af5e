"""The fault-free twin of a run: the same training where nothing fails and nobody stands by; and the comparison.

Rules: two runs may be called the same only where the hashes of both were looked at. A twin that ran before may be used
again when everything that its bits depend on is known and the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from engine.core.checks.trajectory import Row, first_difference
from engine.core.config.job import Job

# What comes with bamboo; files and factories of the user's may change between two runs.
BUILT_IN_DATA = frozenset({"auto", "text", "digits", "synthetic"})
# Facts of a host that choose the kernels that compute, and so the bits.
_FACTS = ("python", "torch", "machine", "cpu", "isa")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of comparing a run with its twin; `difference` is None where every hash agrees.

    A step of which one of the two has no hashes, as when a worker died before it told them, is not compared.
    """

    num_steps: int
    last_step: int  # -1 when no step was compared
    difference: str | None


def twin_of(job: Job) -> Job:
    """Returns the job of the twin: with the same bits, and nothing that a bit does not depend on."""
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
    """Returns a name (hex) for the trajectory of the twin of `job`, or None when it may not be used again.

    `facts` are those of the host, `sources` is a hash of the program.
    """
    if ":" in job.model or job.data not in BUILT_IN_DATA:
        return None
    known = {"job": asdict(twin_of(job)), "facts": {name: facts[name] for name in _FACTS}, "sources": sources}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def compare(rows: Iterable[Row], twin: Iterable[Row]) -> Comparison:
    """Returns how the rows of a run compare with those of its twin."""
    rows, twin = list(rows), list(twin)
    steps = {row.step for row in rows} & {row.step for row in twin}
    difference = first_difference(
        [row for row in rows if row.step in steps], [row for row in twin if row.step in steps]
    )
    if difference is not None:
        difference = difference.replace("in the first", "in this run").replace("in the second", "in its twin")
    return Comparison(len(steps), max(steps, default=-1), difference)
