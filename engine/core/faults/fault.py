"""Faults: a kind, its victims and a moment; and their plain form.

Rules: a fault has a logical time: an action of a slot's owner in a step, or a phase of the recovery from another fault.
A delay counts by the clock from such a moment. A fault strikes once, even if an heir runs the action again. A run in
which a fault never strikes proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from engine.core.action import Action, Op, parse_action
from engine.core.duration import duration_text
from engine.core.scalar import Scalar

When = Literal["before", "during", "after"]
RecoveryPhase = Literal["detect", "agree", "fence", "regroup", "inventory", "plan", "replay", "merged", "heal"]
RoleName = Literal["recoverer", "shadow", "neighbour"]

WHENS: tuple[When, ...] = get_args(When)
PHASES: tuple[RecoveryPhase, ...] = get_args(RecoveryPhase)
WHOLE_AFTERWARDS = f"once a worker is lost, backwards are whole: {Op.B} instead of {Op.I} and {Op.W}"
ROLES: tuple[RoleName, ...] = get_args(RoleName)


@dataclass(frozen=True, slots=True)
class At:
    """The moment before, during or after an action of a step, at the owner of the action's slot.

    A checkpoint of a stage is an action of the worker that writes it.
    """

    step: int
    action: Action
    when: When = "before"

    @property
    def is_half(self) -> bool:
        """Whether the action is one part of a split backward."""
        return self.action.op in (Op.I, Op.W)

    def __str__(self) -> str:
        return f"{self.when} {self.action} of step {self.step}"


@dataclass(frozen=True, slots=True)
class After:
    """The moment `delay_ns` after another fault has struck, or after a phase of the recovery from it has begun."""

    fault: str
    phase: RecoveryPhase | None = None
    delay_ns: int = 0

    def __str__(self) -> str:
        delay = f"{duration_text(self.delay_ns)} after " if self.delay_ns else "at "
        what = f"the phase {self.phase} of the recovery from" if self.phase else "the strike of"
        return f"{delay}{what} {self.fault}"


@dataclass(frozen=True, slots=True)
class Owner:
    """The worker that owns a slot at the moment of the strike."""

    pipeline: int
    stage: int

    def in_words(self, noun: str) -> str:
        """Returns the victim in words; `noun` is that of a slot in a pipeline."""
        return f"the owner of {noun} {self.stage}" + (f" of pipeline {self.pipeline}" if self.pipeline else "")


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker, by its number."""

    worker: int

    def in_words(self, noun: str) -> str:
        """Returns the victim in words."""
        return f"worker {self.worker}"


@dataclass(frozen=True, slots=True)
class Role:
    """The worker in a role for a slot at the moment of the strike: the slot of the action, or of `After.fault`.

    The recoverer owns the slot by the newest verdict. The shadow is the slot's first one. The neighbour owns the next
    stage of the pipeline (after the last stage: the first).
    """

    role: RoleName

    def in_words(self, noun: str) -> str:
        """Returns the victim in words."""
        return f"the {self.role}"


Moment = At | After
Victim = Owner | Worker | Role


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; `id` is unique in a run. All victims are struck at the same moment.

    `do` names a kind in the registry; `parameters` are those of the kind, by `Parameter.key`.
    """

    id: str
    moment: Moment
    victims: tuple[Victim, ...]
    do: str = "kill"
    parameters: Mapping[str, Scalar] = field(default_factory=dict, hash=False)

    def in_words(self, noun: str) -> str:
        """Returns the fault in words; `noun` is that of a slot in a pipeline of the job."""
        usual = isinstance(self.moment, At) and self.victims == (slot_owner(self.moment.action),)
        whom = "" if usual else " " + " and ".join(each.in_words(noun) for each in self.victims)
        how = ", ".join(f"{key.removesuffix('_ns')} {_shown(key, value)}" for key, value in self.parameters.items())
        return f"{self.do}{whom} {self.moment}{f' ({how})' if how else ''}"


def slot_owner(action: Action) -> Owner:
    """Returns the default victim of a fault at an action: the owner of its slot; for a checkpoint, its writer."""
    return Owner(action.pipeline, action.stage)


def struck_by(faults: Sequence[Fault], step: int, action: Action, when: When) -> Fault | None:
    """Returns the first of the faults with this moment, or None."""
    return next((each for each in faults if each.moment == At(step, action, when)), None)


def to_plain(fault: Fault) -> dict[str, Any]:
    """Returns a fault as JSON values; `from_plain` is the inverse."""
    moment: dict[str, Any]
    if isinstance(fault.moment, At):
        moment = {"step": fault.moment.step, "action": str(fault.moment.action), "when": fault.moment.when}
    else:
        moment = {"fault": fault.moment.fault, "phase": fault.moment.phase, "delay_ns": fault.moment.delay_ns}
    victims = [{name: getattr(each, name) for name in each.__dataclass_fields__} for each in fault.victims]
    parameters = dict(fault.parameters)
    return {"id": fault.id, "moment": moment, "victims": victims, "do": fault.do, "parameters": parameters}


def from_plain(plain: Mapping[str, Any]) -> Fault:
    """Returns the fault for the values of `to_plain`."""
    moment = dict(plain["moment"])
    at = At(moment["step"], parse_action(moment["action"]), moment["when"]) if "step" in moment else After(**moment)
    victims = tuple(_VICTIMS[next(iter(each))](**each) for each in plain["victims"])
    return Fault(plain["id"], at, victims, plain["do"], dict(plain["parameters"]))


_VICTIMS: dict[str, Any] = {"pipeline": Owner, "worker": Worker, "role": Role}


def _shown(key: str, value: Scalar) -> str:
    return duration_text(int(value)) if key.endswith("_ns") else str(value)
