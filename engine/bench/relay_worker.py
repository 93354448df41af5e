"""A worker of the relay benchmark: joins the group of its round, waits, and reports when it learned of an exit.

The victim kills itself as soon as training begins.
"""

from __future__ import annotations

import os
import signal
import time

from engine.bench.figures import Round
from engine.core.history.run_records import MarkRecord
from engine.core.messages import ByeMessage, ReadyMessage
from engine.runtime.process.clock import now_ns
from engine.runtime.process.control import Control, Stopped
from engine.runtime.process.link import Link
from engine.runtime.process.prctl import sleep_exactly
from engine.runtime.process.recorder import Recorder
from engine.runtime.transport.direct_transport import DirectBackend, LinkCuts
from engine.runtime.transport.links import Links

_SETTLE_S = 0.02  # so that no worker is still busy with the beginning of training
_LINGER_S = 0.02  # so that the exit of the first worker that is told takes no processor time from the others


class _Stamped(Control):
    """Notes the time at which its thread learned that this worker must stop."""

    told_ns = 0

    def wake(self) -> None:
        if self.inbox.is_urgent:
            self.told_ns = now_ns()
        super().wake()


def main(control_fd: int, events_fd: int, steps_fd: int, board_fd: int) -> int:
    """Runs one worker of one round."""
    sleep_exactly()
    control = _Stamped(Link.from_fd(control_fd))
    order = control.take(Round)
    recorder = Recorder(events_fd, order.worker)
    plane = DirectBackend(LinkCuts(control), Links(control)).joining(0, order.ranks).join()
    recorder.write(MarkRecord(phase="formed", epoch=0))
    try:
        control.send(ReadyMessage())
        control.hear()  # the epoch, which begins training: no worker has to answer
        if order.worker == order.victim:
            time.sleep(_SETTLE_S)
            os.kill(os.getpid(), signal.SIGKILL)
        control.take(ByeMessage)
    except Stopped:
        time.sleep(_LINGER_S)
        recorder.write(MarkRecord(phase="told", epoch=0, at_ns=control.told_ns))
    plane.close()
    return 0
