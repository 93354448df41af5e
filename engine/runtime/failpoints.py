"""Failpoints: a worker's part in a fault. It says when the moment has come; the agent strikes.

Rules: a worker never harms itself, so that the event is on disk before the blow and the signal goes through a pidfd.
Before or after an action the worker stands still until the agent has struck; during one it goes on at once. A fault
that has been told to have fired anywhere is off everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from engine.core.action import Action
from engine.core.fault import Fault, When, struck_by
from engine.runtime.control import Control
from engine.runtime.recorder import now_ns

_PATIENCE_NS = 10_000_000_000  # for the agent's blow; after it the fault has not fired, which fails the case


class Failpoints:
    """The faults that this worker may still meet; without any it costs nothing."""

    def __init__(self, control: Control, worker: int, faults: Sequence[Fault] = ()):
        self.control = control
        self.worker = worker
        self.faults = list(faults)

    @property
    def armed(self) -> bool:
        """Whether any fault is left."""
        return bool(self.faults)

    def at(self, step: int, action: Action, when: When) -> None:
        """Has the agent strike if a fault is due at this moment; raises what `Control.wait_until` raises."""
        fault = struck_by(self.faults, step, action, when)
        if fault is None:
            return
        self.faults.remove(fault)
        if fault.id in self.control.fired:
            return
        self.control.send("strike", fault=fault.id)
        if when != "during":
            self._stand_still(fault)

    def _stand_still(self, fault: Fault) -> None:
        until_ns = now_ns() + _PATIENCE_NS
        alarm = threading.Timer(_PATIENCE_NS / 1e9, self.control.wake)
        alarm.daemon = True
        alarm.start()
        try:
            self.control.wait_until(lambda: (fault.id in self.control.fired or now_ns() > until_ns) or None)
        finally:
            alarm.cancel()
