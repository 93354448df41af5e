"""Signals: faults that the agent injects from outside, through a pidfd."""

from __future__ import annotations

import signal
from typing import Any

from engine.core.faults.fault_kind import Parameter
from engine.runtime.faults.registry import AgentFaultContext, Parameters, Sign, exit_by, fault_kind

_GRACE = Parameter(
    "grace", "duration", "from SIGTERM to SIGKILL, which is sent only if the worker still lives", 120 * 10**9
)
_FOR = Parameter("for", "duration", "how long it stands still; without it, until the worker is killed")


def _warned(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign in ("notice", "exit")


def _stands_still(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign == "state" and value == "T"


@fault_kind("kill", "Ends the worker at once: SIGKILL.", "agent", exit_by(-signal.SIGKILL), ends=True)
def kill(context: AgentFaultContext) -> None:
    """Sends SIGKILL."""
    context.child.signal(signal.SIGKILL)


@fault_kind("terminate", "Warns the worker as clouds do: SIGTERM, later SIGKILL.", "agent", _warned, _GRACE, ends=True)
def terminate(context: AgentFaultContext) -> None:
    """Sends SIGTERM, and SIGKILL after the grace period."""
    context.child.signal(signal.SIGTERM)
    context.later(int(context.parameters["grace_ns"]), lambda: context.child.signal(signal.SIGKILL))


@fault_kind("stop", "Makes the worker stand still: SIGSTOP, later SIGCONT.", "agent", _stands_still, _FOR)
def stop(context: AgentFaultContext) -> None:
    """Sends SIGSTOP, and SIGCONT after the given time, if any."""
    context.child.signal(signal.SIGSTOP)
    if "for_ns" in context.parameters:
        context.later(int(context.parameters["for_ns"]), lambda: context.child.signal(signal.SIGCONT))
