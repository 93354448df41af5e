"""Signals: faults that the agent injects from outside, through a pidfd."""

from __future__ import annotations

import signal
from typing import Any

from engine.core.faults.fault_kind import Parameter
from engine.runtime.faults.registry import Blow, Parameters, Sign, exit_by, fault_kind

_GRACE = Parameter(
    "grace", "duration", "from SIGTERM to SIGKILL, which is sent only if the worker still lives", 120 * 10**9
)
_FOR = Parameter("for", "duration", "how long it stands still; without it, until the worker is killed")


def _warned(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign in ("notice", "exit")


def _stands_still(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign == "state" and value == "T"


@fault_kind("kill", "Ends the worker at once: SIGKILL.", "agent", exit_by(-signal.SIGKILL), ends=True)
def kill(blow: Blow) -> None:
    """Sends SIGKILL."""
    blow.child.signal(signal.SIGKILL)


@fault_kind("terminate", "Warns the worker as clouds do: SIGTERM, later SIGKILL.", "agent", _warned, _GRACE, ends=True)
def terminate(blow: Blow) -> None:
    """Sends SIGTERM, and SIGKILL after the grace period."""
    blow.child.signal(signal.SIGTERM)
    blow.later(int(blow.parameters["grace_ns"]), lambda: blow.child.signal(signal.SIGKILL))


@fault_kind("stop", "Makes the worker stand still: SIGSTOP, later SIGCONT.", "agent", _stands_still, _FOR)
def stop(blow: Blow) -> None:
    """Sends SIGSTOP, and SIGCONT after the given time, if any."""
    blow.child.signal(signal.SIGSTOP)
    if "for_ns" in blow.parameters:
        blow.later(int(blow.parameters["for_ns"]), lambda: blow.child.signal(signal.SIGCONT))
