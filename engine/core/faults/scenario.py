"""Scenarios: a job, the faults that are asked for, and what must come of them. Values only.

What is random is not decided yet: `expansion.py` turns the faults that are asked for into concrete ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from engine.core.config.job import Job
from engine.core.duration import duration_text
from engine.core.faults.fault import After, At, RoleName
from engine.core.scalar import Scalar

# noticed: the run ends by itself because it sees that its numbers are wrong.
Outcome = Literal["recovered", "resumable", "state-lost", "noticed"]
# as far as hashed: in every step of which both have hashes.
Agreement = Literal["identical", "as far as hashed"]

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class Every:
    """Up to `count` moments with exponential gaps of `mtbf_steps` on average, at random actions."""

    mtbf_steps: float
    count: int

    def __str__(self) -> str:
        return f"every {self.mtbf_steps:g} steps on average, {self.count} at most"


Trigger = At | After | Every


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a fault is for; without anything, whoever owns the slot of the moment's action.

    A slot needs both `pipeline` and `stage`. With a `count` the further victims own slots of the grid that follow the
    first in its pipeline, wrapping round (`adjacent`), that do not (not `adjacent`), or any (None).
    """

    pipeline: int | None = None
    stage: int | None = None
    worker: int | None = None
    role: RoleName | Literal["random"] | None = None
    count: int = 1
    adjacent: bool | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A fault as a scenario asks for it."""

    id: str
    trigger: Trigger
    target: Target
    do: str
    parameters: Mapping[str, Scalar] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """What recoveries may take at most, in nanoseconds: the 95th percentile and the longest pause, and phases."""

    p95_ns: int | None = None
    max_ns: int | None = None
    phases_ns: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        limits = {"p95": self.p95_ns, "max": self.max_ns, **self.phases_ns}
        return ", ".join(f"{name} {duration_text(limit)}" for name, limit in limits.items() if limit is not None)


@dataclass(frozen=True, slots=True)
class Expect:
    """What must come of a scenario; what is None is not looked at."""

    outcome: Outcome = "recovered"
    trajectory: Agreement | None = None
    steps_lost: int | None = None
    samples: Literal["exactly-once"] | None = None
    culprit: Literal["exact", "nobody"] | None = None
    leftovers: Literal["none"] | None = None
    recovery: Limits | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario, as its file says it."""

    name: str
    about: str
    job: Job
    faults: tuple[Wanted, ...]
    expect: Expect = Expect()
