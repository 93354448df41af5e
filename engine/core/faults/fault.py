"""Faults: what is done to whom, and at which moment; and their plain form.

Rules: a fault has a logical time: at an action of the owner of a slot in a step, or in a phase of the recovery from
another fault; a delay by the clock counts from such a moment. It strikes once, also when its step is run again by an
heir. A fault that never strikes proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from engine.core.action import Action, Op, parse_action
from engine.core.duration import duration_text
from engine.core.scalar import Scalar

When = Literal["before", "during", "after"]
Phase = Literal["detect", "agree", "fence", "regroup", "inventory", "plan", "replay", "merged", "heal"]
RoleName = Literal["recoverer", "shadow", "neighbour"]

WHENS: tuple[When, ...] = get_args(When)
PHASES: tuple[Phase, ...] = get_args(Phase)
WHOLE_AFTERWARDS = f"once a worker is lost, backwards are whole: {Op.B} instead of {Op.I} and {Op.W}"
ROLES: tuple[RoleName, ...] = get_args(RoleName)


@dataclass(frozen=True, slots=True)
class At:
    """The moment at which the owner of a slot is before, in, or after an action of a step."""

    step: int
    action: Action
    when: When = "before"

    @property
    def is_half(self) -> bool:
        """Whether this is at half of a backward."""
        return self.action.op in (Op.I, Op.W)

    def __str__(self) -> str:
        return f"{self.when} {self.action} of step {self.step}"


@dataclass(frozen=True, slots=True)
class After:
    """The moment `delay_ns` after a phase of the recovery from another fault began, or after that fault itself."""

    fault: str
    phase: Phase | None = None
    delay_ns: int = 0

    def __str__(self) -> str:
        delay = f"{duration_text(self.delay_ns)} after " if self.delay_ns else "at "
        what = f"the phase {self.phase} of the recovery from" if self.phase else "the strike of"
        return f"{delay}{what} {self.fault}"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whoever owns a slot at the moment of the strike."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"the owner of stage {self.stage}" + (f" of pipeline {self.pipeline}" if self.pipeline else "")


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker, whatever it owns."""

    worker: int

    def __str__(self) -> str:
        return f"worker {self.worker}"


@dataclass(frozen=True, slots=True)
class Role:
    """Who plays a part for a slot at the moment of the strike: that of the action, or that which `After.fault` struck.

    The recoverer is its owner by the newest verdict, the shadow its first one, the neighbour the owner of the stage
    after it (after the last: of the first) in its pipeline.
    """

    role: RoleName

    def __str__(self) -> str:
        return f"the {self.role}"


Moment = At | After
Victim = Owner | Worker | Role


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; `id` is unique in a run. All victims are struck at the same moment.

    `do` names a kind of the registry, `parameters` are its own, by `Parameter.key`.
    """

    id: str
    moment: Moment
    victims: tuple[Victim, ...]
    do: str = "kill"
    parameters: Mapping[str, Scalar] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        usual = isinstance(self.moment, At) and self.victims == (slot_owner(self.moment.action),)
        whom = "" if usual else " " + " and ".join(str(each) for each in self.victims)
        how = ", ".join(f"{key.removesuffix('_ns')} {_shown(key, value)}" for key, value in self.parameters.items())
        return f"{self.do}{whom} {self.moment}{f' ({how})' if how else ''}"


def slot_owner(action: Action) -> Owner:
    """Returns the victim that is meant when a fault at an action names nobody."""
    return Owner(action.pipeline, action.stage)


def struck_by(faults: Sequence[Fault], step: int, action: Action, when: When) -> Fault | None:
    """Returns the first of the faults that strike at this moment, or None."""
    return next((each for each in faults if each.moment == At(step, action, when)), None)


def to_plain(fault: Fault) -> dict[str, Any]:
    """Returns a fault as values that JSON can hold; `from_plain` reads them."""
    moment: dict[str, Any]
    if isinstance(fault.moment, At):
        moment = {"step": fault.moment.step, "action": str(fault.moment.action), "when": fault.moment.when}
    else:
        moment = {"fault": fault.moment.fault, "phase": fault.moment.phase, "delay_ns": fault.moment.delay_ns}
    victims = [{name: getattr(each, name) for name in each.__dataclass_fields__} for each in fault.victims]
    parameters = dict(fault.parameters)
    return {"id": fault.id, "moment": moment, "victims": victims, "do": fault.do, "parameters": parameters}


def from_plain(plain: Mapping[str, Any]) -> Fault:
    """Returns the fault that `to_plain` made these values of."""
    moment = dict(plain["moment"])
    at = At(moment["step"], parse_action(moment["action"]), moment["when"]) if "step" in moment else After(**moment)
    victims = tuple(_VICTIMS[next(iter(each))](**each) for each in plain["victims"])
    return Fault(plain["id"], at, victims, plain["do"], dict(plain["parameters"]))


_VICTIMS: dict[str, Any] = {"pipeline": Owner, "worker": Worker, "role": Role}


def _shown(key: str, value: Scalar) -> str:
    return duration_text(int(value)) if key.endswith("_ns") else str(value)
