"""Failpoints: the moments at which a fault strikes a worker. The worker reports the moment, and the agent strikes.

    worker   at the moment: StrikeMessage ->                            -> carries out the InflictMessage, or goes on
    agent                                   records the fault, strikes ->  with a signal, or with an InflictMessage

Rules: the record is on disk before the strike. A worker carries out a fault against itself in its main thread, also
inside a wait. The worker stands still until the answer of the agent. One case is different: a signal during an action
strikes while the action runs, and the worker does not record the end of the action before the strike. After a fault has
struck one worker, it strikes no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.core.action import COMPUTE_OPS, Action, Op
from engine.core.errors import required
from engine.core.faults.fault import After, At, Fault, When, from_plain, struck_by
from engine.core.messages import ArmMessage, FaultEffectMessage, InflictMessage, StrikeMessage
from engine.files.checkpoint_disk import DiskTroubles
from engine.runtime.faults.registry import WorkerFaultContext, registered
from engine.runtime.process.clock import now_ns
from engine.runtime.process.control import Control
from engine.runtime.process.recorder import Recorder
from engine.runtime.stage.replicas import Replicas
from engine.runtime.transport.transport import LinkFaults

_PATIENCE_NS = 10_000_000_000  # to wait for a strike; without a strike the fault has not fired, and its case fails
_OWN_PHASES = ("fence", "regroup")  # phases that the agent knows from messages of the workers alone


@dataclass(slots=True)
class _Slowdown:
    """A fault that slows down compute actions to a time, but at least one action."""

    fault: str
    factor: float
    until_ns: int
    is_confirmed: bool = False


class Failpoints:
    """The faults that may still strike this worker; a run without faults pays nothing for them."""

    def __init__(
        self,
        control: Control,
        faults: Sequence[Fault] = (),
        replicas: Replicas | None = None,
        links: LinkFaults = LinkFaults(),  # noqa: B008 - it does not change
        troubles: DiskTroubles | None = None,
        recorder: Recorder | None = None,
    ):
        self.control, self._recorder = control, recorder
        self.faults: list[Fault] = []
        self.replicas = replicas
        self._links = links
        self._troubles = troubles
        self._slowdown: _Slowdown | None = None
        self._due: Fault | None = None  # the fault that is to strike during the present action
        self._arm(faults)

    def _arm(self, faults: Sequence[Fault]) -> None:
        """Adds the faults at an action; marks this worker's phases for the agent if a fault waits for one of them."""
        self.faults += [fault for fault in faults if isinstance(fault.moment, At)]
        if any(isinstance(fault.moment, After) and fault.moment.phase in _OWN_PHASES for fault in faults):
            self.control.tells_marks = True

    @property
    def is_armed(self) -> bool:
        """Whether any fault is left, or has a lasting effect."""
        return bool(self.faults) or self._slowdown is not None

    def at(self, step: int, action: Action, when: When) -> None:
        """Has the agent strike with each fault of this moment; raises the exceptions of `Control.wait_until`."""
        while (fault := struck_by(self.faults, step, action, when)) is not None:
            self.faults = [each for each in self.faults if each.id != fault.id]
            if fault.id in self.control.fired:
                continue
            done = (-1, "") if self._recorder is None else self._recorder.last
            self.control.send(StrikeMessage(fault.id, *done))
            if when != "during" or registered()[fault.do].kind.by == "worker":
                self._stand_still(fault)
            else:
                self._due = fault

    def around_checkpoint(
        self, step: int, stages: Sequence[int], begin: Callable[[], None], finish: Callable[[], None]
    ) -> None:
        """Writes stages by `begin`, and `finish` if a fault follows, with the strikes around; raises as `at` does."""
        actions = [Action(stage, Op.CHECKPOINT) for stage in stages]
        self._at_all(step, actions, "before")
        begin()
        self._at_all(step, actions, "during")
        if any(struck_by(self.faults, step, action, "after") for action in actions):
            finish()
            self._at_all(step, actions, "after")

    def _at_all(self, step: int, actions: Iterable[Action], when: When) -> None:
        for action in actions:
            self.at(step, action, when)
            self.delay(step, action, now_ns())

    def _stand_still(self, fault: Fault) -> None:
        until_ns = now_ns() + _PATIENCE_NS
        alarm = threading.Timer(_PATIENCE_NS / 1e9, self.control.wake)
        alarm.daemon = True
        alarm.start()
        try:
            self.control.wait_until(lambda: (fault.id in self.control.fired or now_ns() > until_ns) or None)
        finally:
            alarm.cancel()

    def handle(self, message: ArmMessage | InflictMessage) -> None:
        """Adds faults that the agent has sent after the start, or carries out a fault; called in the main thread."""
        if isinstance(message, ArmMessage):
            self._arm([from_plain(each) for each in message.faults])
            return
        replicas = required(self.replicas, "the agent strikes workers that have replicas")
        context = WorkerFaultContext(
            fault=message.fault,
            parameters=message.parameters,
            stage=None if message.slot is None else replicas.stages.get(message.slot),
            control=self.control,
            tell=lambda how: self.control.send(FaultEffectMessage(message.fault, how)),
            slow_down=partial(self._slow_down, message.fault),
            links=self._links,
            device=replicas.device,
            troubles=self._troubles,
        )
        registered()[message.do].strike(context)

    def _slow_down(self, fault: str, factor: float, for_ns: int) -> None:
        self._slowdown = _Slowdown(fault, factor, now_ns() + for_ns)

    def delay(self, step: int, action: Action, start_ns: int, waited_ns: int = 0) -> None:
        """Delays the end of an action: until the fault during it has struck, and by the factor of a slowdown.

        The factor leaves out `waited_ns`, the wait for a core. Raises the exceptions of `Control.wait_until`.
        """
        due, self._due = self._due, None
        if due is not None:
            self._stand_still(due)
        slowdown = self._slowdown
        if slowdown is None or action.op not in COMPUTE_OPS:
            return
        if slowdown.is_confirmed and start_ns > slowdown.until_ns:
            self._slowdown = None
            return
        took_ns = now_ns() - start_ns - waited_ns
        time.sleep(took_ns * max(0.0, slowdown.factor - 1.0) / 1e9)
        if not slowdown.is_confirmed:
            slowdown.is_confirmed = True
            how = f"{action} took {(now_ns() - start_ns) / 1e6:.2f} ms instead of {took_ns / 1e6:.2f} ms"
            self.control.send(FaultEffectMessage(slowdown.fault, how))
