"""The position of a worker on the board, where the agent reads it without the worker's help.

Rule: the time inside an action begins again after data is loaded, so a slow source makes no action slow.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from engine.core.membership.evidence import Loading
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import now_ns


class Whereabouts:
    """The position of `worker`; its main thread moves, and any thread may load data."""

    def __init__(self, board: ProgressBoard, worker: int):
        self._board, self._worker = board, worker
        self._lock = threading.Lock()
        self._at = (0, 0, 0, False)
        self._since_ns = now_ns()
        self._slowest_ns = self._slowest_before_ns = 0
        self._num_loading = {Loading.AHEAD: 0, Loading.MAIN: 0}
        self._loading = Loading.NONE

    def move(self, epoch: int, step: int, index: int, inside: bool) -> None:
        """Tells that the worker is inside action number `index` of a step, or has left it."""
        with self._lock:
            time_ns, (_, step_before, _, was_inside) = now_ns(), self._at
            if was_inside:
                self._slowest_ns = max(self._slowest_ns, time_ns - self._since_ns)
            if step != step_before:
                self._slowest_before_ns, self._slowest_ns = self._slowest_ns, 0
            self._at, self._since_ns = (epoch, step, index, inside), time_ns
            self._tell()

    @contextlib.contextmanager
    def loading(self, *, ahead: bool = False) -> Iterator[None]:
        """Tells that data is loaded in the block; `ahead` if the main thread does not wait for it."""
        how = Loading.AHEAD if ahead else Loading.MAIN
        self._load(how, 1)
        try:
            yield
        finally:
            self._load(how, -1)

    def _load(self, how: Loading, change: int) -> None:
        with self._lock:
            self._num_loading[how] += change
            self._loading = max((each for each, number in self._num_loading.items() if number), default=Loading.NONE)
            if how is Loading.MAIN:
                self._since_ns = now_ns()
            self._tell()

    def _tell(self) -> None:
        slowest_ns = max(self._slowest_ns, self._slowest_before_ns)
        # A plain tuple: it is written twice an action, and a named one takes as long as the write.
        self._board.place(self._worker, (*self._at, self._since_ns, slowest_ns, self._loading))
