"""Kinds of faults and their parameters: the definitions against which a scenario is checked.

`engine/runtime/faults` registers the kinds, where they are carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.core.duration import DURATION_FORM, parse_duration
from engine.core.scalar import Scalar

AT_ONCE = frozenset({"kill"})  # kinds that end their victim at once
WITH_NOTICE = frozenset({"terminate"})  # kinds whose victim may hand its stages over before it ends
HARMLESS = frozenset({"noop"})  # kinds without an effect

ParameterForm = Literal["duration", "count", "number", "text", "choice"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kind. If the user gives no value and it has no default, `Fault.parameters` lacks it."""

    name: str  # as a scenario spells it, such as "for"
    form: ParameterForm
    about: str
    default: Scalar | None = None  # in the program's units
    required: bool = False
    choices: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Its key in `Fault.parameters`, where a duration is an integer of nanoseconds."""
        return f"{self.name}_ns" if self.form == "duration" else self.name

    @property
    def expected(self) -> str:
        """The form of a value, in words."""
        if self.form == "choice":
            return f"one of {', '.join(self.choices)}"
        return {"duration": DURATION_FORM, "count": "a whole number >= 0", "number": "a number > 0", "text": "text"}[
            self.form
        ]

    def read(self, value: object) -> Scalar | None:
        """Returns a value of a scenario file in the program's units, or None if it has another form."""
        match self.form:
            case "duration":
                return parse_duration(value) if isinstance(value, str) else None
            case "count":
                return value if type(value) is int and value >= 0 else None
            case "number":
                return value if isinstance(value, (int, float)) and type(value) is not bool and value > 0 else None
            case "text":
                return value if isinstance(value, str) else None
            case "choice":
                return value if isinstance(value, str) and value in self.choices else None


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault; `by` carries it out, `ends` says whether it ends its victim."""

    name: str
    about: str  # one sentence
    by: Literal["agent", "worker"]
    ends: bool
    parameters: tuple[Parameter, ...] = ()

    def with_defaults(self, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns the `given` parameters, by key, and the defaults of the others."""
        defaults = {each.key: each.default for each in self.parameters if each.default is not None}
        return {**defaults, **given}
