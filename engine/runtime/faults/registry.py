"""The registry of kinds of faults: who carries each out, and by which sign the agent knows that it has taken effect.

Rules: a kind stands in one place, the function that carries it out. The agent acts through a pidfd (`Blow`); a worker
acts in its own main thread when the agent, who has recorded the fault, says so (`Scene`). An effect that no sign
confirms proves nothing.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import engine.runtime.faults as package
from engine.core.faults.fault_kind import FaultKind, Parameter
from engine.core.scalar import Scalar

if TYPE_CHECKING:
    from engine.core.ownership import Slot
    from engine.runtime.ipc.control import Control
    from engine.runtime.process.children import Child
    from engine.runtime.replica.replicas import Replicas

Parameters = Mapping[str, Scalar]
# How a worker's process ended; that it gave notice, raised, or did to itself what was asked; the state in /proc.
Sign = Literal["exit", "notice", "raised", "suffered", "state"]
Shows = Callable[[Sign, Any, Parameters], bool]  # whether a sign and its value confirm the effect


@dataclass(frozen=True, slots=True)
class Blow:
    """What the agent strikes with; `later` runs something after so many nanoseconds, if the victim lives still."""

    child: Child
    parameters: Parameters
    later: Callable[[int, Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a worker that is to harm itself finds; `slot` is the one that the fault is about.

    `tell` confirms the effect in words. `drag` makes compute actions slower from now on, by a factor, for so many
    nanoseconds or to the end of the step.
    """

    fault: str
    parameters: Parameters
    slot: Slot | None
    control: Control
    replicas: Replicas
    tell: Callable[[str], None]
    drag: Callable[[float, int | None], None]


@dataclass(frozen=True, slots=True)
class Registered:
    """A kind with what carries it out and what confirms it."""

    kind: FaultKind
    strike: Callable[[Any], None]
    shows: Shows


_KINDS: dict[str, Registered] = {}

Strike = TypeVar("Strike", bound=Callable[[Any], None])


def fault_kind(
    name: str, about: str, by: Literal["agent", "worker"], shows: Shows, *parameters: Parameter, ends: bool = False
) -> Callable[[Strike], Strike]:
    """Registers the function below as what carries a kind out."""

    def register(strike: Strike) -> Strike:
        assert name not in _KINDS, f"two kinds of fault are called {name!r}"
        _KINDS[name] = Registered(FaultKind(name, about, by, ends, parameters), strike, shows)
        return strike

    return register


@functools.cache
def registered() -> Mapping[str, Registered]:
    """Returns every kind by its name; the modules of this package are what there is."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_KINDS.items()))


def kinds() -> dict[str, FaultKind]:
    """Returns the definition of every kind by its name, for whoever checks what a user wrote."""
    return {name: each.kind for name, each in registered().items()}


def exit_by(*codes: int) -> Shows:
    """Returns what is shown by an end with one of these codes, negative for a signal."""
    return lambda sign, value, parameters: sign == "exit" and value in codes


def at_once(sign: Sign, value: Any, parameters: Parameters) -> bool:
    """Says that the worker's own word confirms the effect."""
    return sign == "suffered"
