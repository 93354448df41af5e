"""The position of a worker on the board, where the agent reads it without the worker's help.

Rule: the time inside an action begins again after data is loaded, so a slow source makes no action slow.
"""

from __future__ import annotations

import threading

from engine.core.membership.evidence import Loading
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import now_ns


class Whereabouts:
    """The position of `worker`; its main thread moves and loads data, and other threads may load ahead."""

    def __init__(self, board: ProgressBoard, worker: int):
        self._board, self._worker = board, worker
        self._at = (0, 0, 0, False)
        self._num_ahead, self._lock = 0, threading.Lock()
        self._slowest_ns = self._slowest_before_ns = 0
        self._tell(now_ns())

    def move(self, epoch: int, step: int, index: int, inside: bool) -> None:
        """Tells that the worker is inside action number `index` of a step, or has left it."""
        time_ns, (_, step_before, _, was_inside) = now_ns(), self._at
        if was_inside and time_ns - self._since_ns > self._slowest_ns:
            self._slowest_ns = time_ns - self._since_ns
        if step != step_before:
            self._slowest_before_ns, self._slowest_ns = self._slowest_ns, 0
        self._at = (epoch, step, index, inside)
        self._tell(time_ns)

    def _tell(self, since_ns: int) -> None:
        self._since_ns = since_ns
        slowest_ns, before_ns = self._slowest_ns, self._slowest_before_ns
        slowest_ns = slowest_ns if slowest_ns > before_ns else before_ns
        # A plain tuple: it is written at each action, and a named one takes as long as the write.
        self._board.place(self._worker, (*self._at, since_ns, slowest_ns))

    def load(self, is_loading: bool, *, ahead: bool) -> None:
        """Tells that a thread begins to load data, or ends; `ahead` if the main thread does not wait for it."""
        if ahead:
            with self._lock:
                self._num_ahead += 1 if is_loading else -1
                self._board.load(self._worker, Loading.AHEAD, self._num_ahead > 0)
            return
        if not is_loading:
            self._tell(now_ns())
        self._board.load(self._worker, Loading.MAIN, is_loading)
