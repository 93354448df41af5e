"""Signals: faults that the agent injects from outside, through a pidfd."""

from __future__ import annotations

import signal
from typing import Any

from engine.core.faults.fault_kind import Parameter, Parameters, Sign, TimedSignal
from engine.runtime.faults.registry import exit_by, fault_kind

_GRACE = Parameter(
    "grace", "duration", "from SIGTERM to SIGKILL, which is sent only if the worker still lives", 120 * 10**9
)
_FOR = Parameter("for", "duration", "how long it stands still; without it, until the worker is killed")


def _warned(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign in ("notice", "exit")


def _stands_still(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign == "state" and value == "T"


@fault_kind("kill", "Ends the worker at once: SIGKILL.", "agent", exit_by(-signal.SIGKILL), ends=True)
def kill(parameters: Parameters) -> tuple[TimedSignal, ...]:
    """Returns SIGKILL."""
    return (TimedSignal(0, signal.SIGKILL),)


@fault_kind("terminate", "Warns the worker as clouds do: SIGTERM, later SIGKILL.", "agent", _warned, _GRACE, ends=True)
def terminate(parameters: Parameters) -> tuple[TimedSignal, ...]:
    """Returns SIGTERM, and SIGKILL after the grace period."""
    return TimedSignal(0, signal.SIGTERM), TimedSignal(int(parameters["grace_ns"]), signal.SIGKILL)


@fault_kind("stop", "Makes the worker stand still: SIGSTOP, later SIGCONT.", "agent", _stands_still, _FOR)
def stop(parameters: Parameters) -> tuple[TimedSignal, ...]:
    """Returns SIGSTOP, and SIGCONT after the given time, if any."""
    stops = (TimedSignal(0, signal.SIGSTOP),)
    return (*stops, TimedSignal(int(parameters["for_ns"]), signal.SIGCONT)) if "for_ns" in parameters else stops
