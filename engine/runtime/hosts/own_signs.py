"""Signs of life of the workers of this host, for the host that coordinates: four times a second, in few messages.

Rule: a sign tells how many signals the worker had got when its process was looked at, so that no older look can confirm
a fault. After a signal that stops a worker a sign goes at once. Time in which this host stood still is no silence of
its workers.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence

from engine.core.hosts.host_messages import sign_frames
from engine.core.membership.evidence import unwatched_ns
from engine.core.message_codec import encode
from engine.core.process_messages import PingMessage
from engine.runtime.hosts.own_process import OwnProcess
from engine.runtime.hosts.stream_end import StreamEnd
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import now_ns

_TICK_S = 0.25
_STOPS_S = 0.02  # until a worker stands still after a signal; a later sign tells it too
_STOPPED = ("T", None)  # None: it has ended
_PING = encode(PingMessage())


class OwnSigns:
    """Tells the signs of the processes that `all_of` returns, and asks them for heartbeats, in a thread of its own."""

    def __init__(self, board: ProgressBoard, all_of: Callable[[], Sequence[OwnProcess]]):
        self._board, self._all_of = board, all_of
        self._end: StreamEnd | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._tell_all, name="signs", daemon=True).start()

    def follow(self, end: StreamEnd) -> None:
        """Tells them over this stream from now on, to a host that has sent no signal yet."""
        for each in self._all_of():
            each.num_signals = 0
        self._end = end

    def close(self) -> None:
        """Ends the thread."""
        self._is_over.set()

    def _tell_all(self) -> None:
        looked_ns = now_ns()
        while not self._is_over.wait(_TICK_S):
            living, end = [each for each in self._all_of() if not each.has_ended], self._end
            late_ns, looked_ns = unwatched_ns(looked_ns, at_ns := now_ns()), at_ns
            for each in living:
                each.heard_ns = min(at_ns, each.heard_ns + late_ns)
            if end is None:
                continue
            self._send(end, living)
            for each in living:
                with contextlib.suppress(OSError):  # it was released meanwhile
                    each.link.send_packet(_PING)

    def tell(self, of: OwnProcess) -> None:
        """Tells the sign of one process at once."""
        if self._end is not None:
            self._send(self._end, [of])

    def signal(self, of: OwnProcess, number: signal.Signals) -> None:
        """Sends a signal to a worker; tells at once that it stands still, for which a fault may wait."""
        of.child.signal(number)
        of.num_signals += 1
        if number is signal.SIGSTOP:
            until_s = time.monotonic() + _STOPS_S
            while of.child.state() not in _STOPPED and time.monotonic() < until_s:
                time.sleep(_STOPS_S / 20)
            self.tell(of)

    def _send(self, end: StreamEnd, of: Sequence[OwnProcess]) -> None:
        for each in sign_frames(end.received, now_ns(), [process.sign(self._board) for process in of]):
            end.send(each)
