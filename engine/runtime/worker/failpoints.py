"""Failpoints: a worker's part in a fault. It says when the moment has come; the agent records it and strikes.

Rules: the event is on disk before the strike. A signal comes from the agent; what a worker does to itself it does in
its main thread, when the agent says so, wherever that thread waits. Before or after an action, and for whatever it is
to do to itself, the worker stands still until the agent has answered; a strike that is due during an action falls
before that has been recorded as done. A fault that has struck anywhere is off everywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine.core.action import COMPUTE_OPS, Action
from engine.core.faults.fault import After, At, Fault, When, from_plain, struck_by
from engine.core.messages import ArmMessage, InflictMessage, StrikeMessage, SufferedMessage
from engine.runtime.faults.fault_context import WorkerFaultContext
from engine.runtime.faults.registry import registered
from engine.runtime.ipc.control import Control
from engine.runtime.ipc.recorder import now_ns
from engine.runtime.replica.replicas import Replicas

_PATIENCE_NS = 10_000_000_000  # for the agent's strike; after it the fault has not fired, which fails the case

_OWN_PHASES = ("fence", "regroup")  # of which the agent learns from the workers only


@dataclass(slots=True)
class _Slowdown:
    """What makes this worker slow: in one step, or in what begins before a time, but at least in one action."""

    fault: str
    factor: float
    step: int
    until_ns: int | None
    is_told: bool = False


class Failpoints:
    """The faults that this worker may still meet; without any it costs nothing."""

    def __init__(self, control: Control, worker: int, faults: Sequence[Fault] = (), replicas: Replicas | None = None):
        self.control = control
        self.worker = worker
        self.faults: list[Fault] = []
        self.replicas = replicas
        self._slowdown: _Slowdown | None = None
        self._due: Fault | None = None  # during the action that runs
        control.on_fault = self._hear
        self._arm(faults)

    def _arm(self, faults: Sequence[Fault]) -> None:
        """Takes in those that begin at an action; of the others it may be that the agent wants to know of phases."""
        self.faults += [fault for fault in faults if isinstance(fault.moment, At)]
        if any(isinstance(fault.moment, After) and fault.moment.phase in _OWN_PHASES for fault in faults):
            self.control.tells_marks = True

    @property
    def armed(self) -> bool:
        """Whether any fault is left, or has a lasting effect."""
        return bool(self.faults) or self._slowdown is not None

    def at(self, step: int, action: Action, when: When) -> None:
        """Has the agent strike whatever is due at this moment; raises what `Control.wait_until` raises."""
        while (fault := struck_by(self.faults, step, action, when)) is not None:
            self.faults = [each for each in self.faults if each.id != fault.id]
            if fault.id in self.control.fired:
                continue
            self.control.send(StrikeMessage(fault.id))
            if when != "during" or registered()[fault.do].kind.by == "worker":
                self._stand_still(fault)
            else:
                self._due = fault

    def _stand_still(self, fault: Fault) -> None:
        until_ns = now_ns() + _PATIENCE_NS
        alarm = threading.Timer(_PATIENCE_NS / 1e9, self.control.wake)
        alarm.daemon = True
        alarm.start()
        try:
            self.control.wait_until(lambda: (fault.id in self.control.fired or now_ns() > until_ns) or None)
        finally:
            alarm.cancel()

    def _hear(self, message: ArmMessage | InflictMessage) -> None:
        """Takes in, in the main thread, faults that were not known at the start, or what this worker is to suffer."""
        if isinstance(message, ArmMessage):
            self._arm([from_plain(each) for each in message.faults])
            return
        assert self.replicas is not None
        context = WorkerFaultContext(
            fault=message.fault,
            parameters=message.parameters,
            slot=message.slot,
            control=self.control,
            replicas=self.replicas,
            tell=lambda how: self.control.send(SufferedMessage(message.fault, how)),
            slow_down=partial(self._slow_down, message.fault),
        )
        registered()[message.do].strike(context)

    def _slow_down(self, fault: str, factor: float, for_ns: int | None) -> None:
        self._slowdown = _Slowdown(fault, factor, self.control.at[0], None if for_ns is None else now_ns() + for_ns)

    def delay(self, step: int, action: Action, start_ns: int) -> None:
        """Holds an action, which is done, until what is due during it has struck, and as long as it takes when slow.

        Raises what `Control.wait_until` raises.
        """
        due, self._due = self._due, None
        if due is not None:
            self._stand_still(due)
        slowdown = self._slowdown
        if slowdown is None or action.op not in COMPUTE_OPS:
            return
        if step > slowdown.step if slowdown.until_ns is None else slowdown.is_told and start_ns > slowdown.until_ns:
            self._slowdown = None
            return
        took_ns = now_ns() - start_ns
        time.sleep(took_ns * max(0.0, slowdown.factor - 1.0) / 1e9)
        if not slowdown.is_told:
            slowdown.is_told = True
            how = f"{action} took {(now_ns() - start_ns) / 1e6:.2f} ms instead of {took_ns / 1e6:.2f} ms"
            self.control.send(SufferedMessage(slowdown.fault, how))
