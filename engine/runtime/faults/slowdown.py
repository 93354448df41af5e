"""Slowdown: a worker that is slow or hangs while its process lives."""

from __future__ import annotations

import ctypes
import time

from engine.core.faults.fault_kind import Parameter, at_once
from engine.runtime.faults.registry import WorkerFaultContext, fault_kind

_FOREVER_S = 1_000_000

_FACTOR = Parameter("factor", "number", "how many times as long a forward or backward takes", 4.0)
_SLOW_FOR = Parameter("for", "duration", "how long, but at least one action; without it, to the end of the step")
_HANG_FOR = Parameter("for", "duration", "how long; without it, until the worker is killed")
_GIL = Parameter(
    "gil", "choice", "held: its other threads hang too, heartbeat included", "released", choices=("released", "held")
)


@fault_kind("slow", "The worker computes more slowly for a while.", "worker", at_once, _FACTOR, _SLOW_FOR)
def slow(context: WorkerFaultContext) -> None:
    """Slows down compute actions; the first slow one confirms the effect."""
    for_ns = context.parameters.get("for_ns")
    context.slow_down(float(context.parameters["factor"]), None if for_ns is None else int(for_ns))


@fault_kind("hang", "The worker never comes to the end of an action.", "worker", at_once, _HANG_FOR, _GIL)
def hang(context: WorkerFaultContext) -> None:
    """Waits inside an action, with or without the GIL."""
    for_ns = context.parameters.get("for_ns")
    seconds = _FOREVER_S if for_ns is None else int(for_ns) / 1e9
    held = context.parameters["gil"] == "held"
    context.tell(f"hangs with the GIL {context.parameters['gil']}")
    with context.control.busy():
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if held:
                # PyDLL keeps the GIL during the call.
                ctypes.PyDLL(None).poll(None, 0, round(left_s * 1000))
            else:
                context.control.stand_still(left_s)
