"""Scenarios: a job, the wanted faults, and the expected outcome, as values.

Wanted faults may be random; `expansion.py` turns them into concrete ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from engine.core.action import STAGE_OPS
from engine.core.errors import NoticeKind
from engine.core.faults.fault import After, At, InStep, RoleName
from engine.core.job.job import Job
from engine.core.units import Scalar, described, duration_text

# noticed: the run ends itself because it notices wrong numbers; `Expect.notice` names them.
Outcome = Literal["recovered", "resumable", "state-lost", "noticed"]
# as far as hashed: identical in every step that both runs have hashed.
Agreement = Literal["identical", "as far as hashed"]

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
NOTICES: tuple[NoticeKind, ...] = get_args(NoticeKind)


@dataclass(frozen=True, slots=True)
class Every:
    """Up to `count` moments with exponential gaps of `mtbf_steps` on average, at random actions."""

    mtbf_steps: float = described(..., "the mean number of steps between two faults")
    count: int = described(..., "how many faults at most")

    def __str__(self) -> str:
        return f"every {self.mtbf_steps:g} steps on average, {self.count} at most"


Trigger = At | After | Every | InStep


@dataclass(frozen=True, slots=True)
class Target:
    """The victims of a fault; by default the owner of the slot of the moment's action.

    A slot has `pipeline` and `stage`. With `count`, the other victims own the next slots of the first one's pipeline
    (`adjacent` true), slots that are not adjacent (false), or any (None).
    """

    pipeline: int | None = described(None, "the pipeline of a slot")
    stage: int | None = described(None, "the stage, or the block, of a slot: the worker that owns it at that moment")
    worker: int | None = described(None, "a worker by its number")
    role: RoleName | Literal["random"] | None = described(
        None, "the worker with this role at that moment; random is drawn before"
    )
    count: int = described(1, "victims that are struck at the same moment (default 1)")
    adjacent: bool | None = described(None, "whether their slots are neighbours in one pipeline")
    host: str | None = None  # a fault of hosts has this, or a worker


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

    p95_ns: int | None = described(None, "the 95th percentile of the times that training stalled, at most")
    max_ns: int | None = described(None, "the longest time that training stalled, at most")
    phases_ns: Mapping[str, int] = described(dict, "the longest duration of a phase, at most", hash=False)

    def __str__(self) -> str:
        limits = {"p95": self.p95_ns, "max": self.max_ns, **self.phases_ns}
        return ", ".join(f"{name} {duration_text(limit)}" for name, limit in limits.items() if limit is not None)


@dataclass(frozen=True, slots=True)
class Expect:
    """The expected results of a scenario; None means unchecked."""

    outcome: Outcome = described("recovered", "the outcome of the run (default recovered)")
    trajectory: Agreement | None = described(None, "every committed step has the bits of the fault-free twin")
    steps_lost: int | None = described(None, "committed steps that are trained again, at most")
    samples: Literal["exactly-once"] | None = described(None, "every committed step counts every sample once")
    culprit: Literal["exact", "nobody"] | None = described(None, "exact: the struck workers are evicted, and no others")
    leftovers: Literal["none"] | None = described(None, "no process, socket, shared memory, file or key stays behind")
    recovery: Limits | None = described(None, "limits on the duration of a recovery")
    notice: NoticeKind | None = described(None, "the wrong numbers that the run must notice, with outcome noticed")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario, as read from its file."""

    name: str
    about: str
    job: Job
    faults: tuple[FaultSpec, ...]
    expect: Expect = Expect()


# Scenarios as plain values: the content of a scenario file, for writing one.
#
# Rule: defaults are left out, unless the file would then mean another scenario.

_VERSION = 1


def scenario_plain(scenario: Scenario) -> dict[str, Any]:
    """Returns the content of a file that is read as this scenario."""
    plain: dict[str, Any] = {"version": _VERSION, "name": scenario.name, "about": scenario.about}
    job = {each.name: _plain(getattr(scenario.job, each.name)) for each in fields(Job)}
    usual = Job()
    # The model is always written: a scenario without a job would mean the job of the folder in which it is run.
    plain["job"] = {name: value for name, value in job.items() if name == "model" or value != getattr(usual, name)}
    plain["faults"] = [_fault(each) for each in scenario.faults]
    plain["expect"] = {"outcome": scenario.expect.outcome, **_written(scenario.expect)}
    return {name: value for name, value in plain.items() if value not in ({}, [])}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _fault(spec: FaultSpec) -> dict[str, Any]:
    plain: dict[str, Any] = {"id": spec.id}
    trigger = spec.trigger
    if isinstance(trigger, At):
        plain["at"] = {"step": trigger.step, "stage": trigger.action.stage, "action": trigger.action.op.value}
        if trigger.action.op not in STAGE_OPS:
            plain["at"]["microbatch"] = trigger.action.microbatch
        if trigger.action.pipeline:
            plain["at"]["pipeline"] = trigger.action.pipeline
        if trigger.when != "before":
            plain["at"]["when"] = trigger.when
    elif isinstance(trigger, After):  # it has a phase or a delay
        plain["after"] = ({} if trigger.phase else {"delay": duration_text(0)}) | _written(trigger)
    else:
        plain["at" if isinstance(trigger, InStep) else "every"] = _written(trigger)
    if target := _written(spec.target):
        plain["target"] = target
    plain["do"] = spec.do
    for key, value in spec.parameters.items():
        is_time = key.endswith("_ns")
        plain[key.removesuffix("_ns")] = duration_text(int(value)) if is_time else value
    return plain


def _written(part: Any) -> dict[str, Any]:
    """Returns the fields of a part as a file has them, without those that have their default."""
    plain: dict[str, Any] = {}
    for attribute in fields(part):
        value, (name, _, unit) = getattr(part, attribute.name), attribute.name.rpartition("_")
        if value in (attribute.default, {}):
            continue
        if unit == "ns":
            of_phases = {phase: duration_text(limit) for phase, limit in value.items()} if name == "phases" else {}
            plain[name] = of_phases or duration_text(value)
        elif unit == "steps":
            plain[name] = f"{value:g} steps"
        else:
            plain[attribute.name] = _written(value) if isinstance(value, Limits) else value
    return plain
