"""The registry of kinds of faults: the function that carries out each kind, and the sign that confirms its effect.

Rules: a kind is defined in one place, its function. For a kind by the agent, the function returns the signals that the
agent sends through a pidfd. A worker strikes itself in its main thread (`WorkerFaultContext`), on a message that the
agent sends after the record of the fault. A fault that no sign confirms counts as not struck.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import engine.runtime.faults as package
from engine.core.errors import ensure
from engine.core.faults.fault import HOST_KINDS, ActsOn, FaultKind, Parameter, Parameters, Sign, no_signals

if TYPE_CHECKING:
    from engine.files.checkpoint_disk import DiskTroubles
    from engine.runtime.device.device import Device
    from engine.runtime.process.control import Control
    from engine.runtime.stage.stage import Stage
    from engine.runtime.transport.transport import LinkFaults

Shows = Callable[[Sign, Any, Parameters], bool]  # whether a sign and its value confirm the effect


@dataclass(frozen=True, slots=True)
class WorkerFaultContext:
    """The context of a fault by the worker itself; `stage` is its replica of the target slot, if it has one.

    `tell` confirms the effect with a description. `slow_down(factor, ns)` slows down compute actions from now on, for
    `ns` nanoseconds. `links` are the faults of connections, which tell of
    the first message or frame that they meet. `troubles` are those of the disk under the worker's checkpoints, None if
    it writes none. `device` is the one that it computes on.
    """

    fault: str
    parameters: Parameters
    stage: Stage | None
    control: Control
    tell: Callable[[str], None]
    slow_down: Callable[[float, int], None]
    links: LinkFaults
    device: Device
    troubles: DiskTroubles | None = None


@dataclass(frozen=True, slots=True)
class RegisteredFault:
    """A kind of fault with its function."""

    kind: FaultKind
    strike: Callable[[Any], Any]


_KINDS: dict[str, RegisteredFault] = {}

Strike = TypeVar("Strike", bound=Callable[[Any], Any])


def fault_kind(
    name: str,
    about: str,
    by: Literal["agent", "worker"],
    shows: Shows,
    *parameters: Parameter,
    ends: bool = False,
    acts_on: ActsOn = "process",
) -> Callable[[Strike], Strike]:
    """Registers a function as a kind: by a worker it takes a `WorkerFaultContext`, by the agent it returns signals."""

    def register(strike: Strike) -> Strike:
        ensure(name not in _KINDS, f"two kinds of fault are called {name!r}")
        signals = strike if by == "agent" else no_signals
        kind = FaultKind(name, about, by, ends, parameters, shows, signals, acts_on=acts_on)
        _KINDS[name] = RegisteredFault(kind, strike)
        return strike

    return register


@functools.cache
def registered() -> Mapping[str, RegisteredFault]:
    """Returns all kinds by name; imports all modules of this package."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_KINDS.items()))


def worker_kinds() -> dict[str, FaultKind]:
    """Returns the definitions of the kinds that an agent or a worker carries out, by name."""
    return {name: each.kind for name, each in registered().items()}


def kinds() -> dict[str, FaultKind]:
    """Returns the definitions of all kinds by name, for the checks of a scenario; those of hosts come last."""
    return {**worker_kinds(), **HOST_KINDS}


def exit_by(*codes: int) -> Shows:
    """Returns the test for an end with one of these exit codes, negative for a signal."""
    return lambda sign, value, parameters: sign == "exit" and value in codes
