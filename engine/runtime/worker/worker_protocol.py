"""The worker machine of this process. The main thread carries out its outputs; other threads feed it aside.

An order to prepare a plan or to form the next group, its answer, and a notice are fed by the threads that get them,
also while the main thread is inside a long action. They change nothing that the main thread is about to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.core.process_messages import NextGroupMessage
from engine.core.recovery.plan_messages import PrepareMessage
from engine.core.worker.inputs import GroupKey, Input, Told
from engine.core.worker.machine import step
from engine.core.worker.outputs import FormNextGroup, LeaveNextGroups, Output, PreparePlan, Say
from engine.core.worker.state import WorkerState
from engine.runtime.ipc.control import Control


class WorkerProtocol:
    """The state of the machine; `prepare`, `form` and `leave` get orders about coming epochs, in the control thread."""

    def __init__(self, control: Control):
        self.state = WorkerState()
        self.prepare: Callable[[PrepareMessage], None] = lambda told: None
        self.form: Callable[[NextGroupMessage], None] = lambda told: None
        self.leave: Callable[[tuple[GroupKey, ...]], None] = lambda keys: None
        self._control = control
        self._lock = threading.Lock()
        control.on_prepare = lambda message: self.feed_aside(Told(message))

    def feed(self, given: Input) -> tuple[Output, ...]:
        """Returns the outputs of an input, for the main thread, which calls this."""
        with self._lock:
            self.state, outputs = step(self.state, given)
        self._control.accepted = self.state.epoch
        return outputs

    def feed_aside(self, given: Input) -> None:
        """Feeds an input that does not concern the main thread, in any thread."""
        with self._lock:
            self.state, outputs = step(self.state, given)
        for output in outputs:
            match output:
                case Say():
                    self._control.send(output.message)
                case PreparePlan():
                    self.prepare(output.told)
                case FormNextGroup():
                    self.form(output.told)
                case LeaveNextGroups():
                    self.leave(output.keys)
