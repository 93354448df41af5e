"""Scenarios: a job, the wanted faults, and the expected outcome, as values.

Wanted faults may be random; `expansion.py` turns them into concrete ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from engine.core.config.job import Job
from engine.core.duration import duration_text
from engine.core.errors import NoticeKind
from engine.core.faults.fault import After, At, RoleName
from engine.core.faults.host_fault import HostFault
from engine.core.scalar import Scalar

# noticed: the run ends itself because it notices wrong numbers; `Expect.notice` names them.
Outcome = Literal["recovered", "resumable", "state-lost", "noticed"]
# as far as hashed: identical in every step that both runs have hashed.
Agreement = Literal["identical", "as far as hashed"]

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
NOTICES: tuple[NoticeKind, ...] = get_args(NoticeKind)


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
    """The victims of a fault; by default the owner of the slot of the moment's action.

    A slot needs both `pipeline` and `stage`. With `count`, the other victims own the next slots of the first one's
    pipeline, cyclically (`adjacent` true), slots that are not adjacent (false), or any slots (None).
    """

    pipeline: int | None = None
    stage: int | None = None
    worker: int | None = None
    role: RoleName | Literal["random"] | None = None
    count: int = 1
    adjacent: bool | None = None


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """A fault as a scenario describes it."""

    id: str
    trigger: Trigger
    target: Target
    do: str
    parameters: Mapping[str, Scalar] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of recoveries in nanoseconds: the 95th percentile of the stalls, the longest, and phases."""

    p95_ns: int | None = None
    max_ns: int | None = None
    phases_ns: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        limits = {"p95": self.p95_ns, "max": self.max_ns, **self.phases_ns}
        return ", ".join(f"{name} {duration_text(limit)}" for name, limit in limits.items() if limit is not None)


@dataclass(frozen=True, slots=True)
class Expect:
    """The expected results of a scenario; None means unchecked."""

    outcome: Outcome = "recovered"
    trajectory: Agreement | None = None
    steps_lost: int | None = None
    samples: Literal["exactly-once"] | None = None
    culprit: Literal["exact", "nobody"] | None = None
    leftovers: Literal["none"] | None = None
    recovery: Limits | None = None
    notice: NoticeKind | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario, as read from its file."""

    name: str
    about: str
    job: Job
    faults: tuple[FaultSpec, ...]
    expect: Expect = Expect()
    host_faults: tuple[HostFault, ...] = ()
