"""The one thread of a worker that calls NCCL, for all of its communicators: two threads in NCCL at once are forbidden.

It does its tasks in their order: so an epoch's communicator is aborted before the next one is opened.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable

from engine.runtime.process.network_namespace import inside

_LOOK_EVERY_S = 0.1  # for failures, while there is no task


class NcclThread:
    """The tasks of one worker for NCCL; its sockets lie in the `network` of the run, if it has one."""

    def __init__(self, name: str, network: int | None = None):
        self._name, self._network = name, network
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.look: Callable[[], None] = lambda: None  # of the present communicator

    def give(self, task: Callable[[], None]) -> None:
        """Has a task done behind those that were given before; any thread may call."""
        self._tasks.put(task)
        with self._starting:
            if self._thread is None:  # a worker that waits for its first group needs none
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Ends the thread behind the tasks that were given."""
        self._tasks.put(None)

    def _run(self) -> None:
        with contextlib.nullcontext() if self._network is None else inside(self._network):
            while True:
                task: Callable[[], None] | None
                try:
                    task = self._tasks.get(timeout=_LOOK_EVERY_S)
                except queue.Empty:
                    task = self.look
                if task is None:
                    return
                try:
                    task()
                except Exception:  # a mistake of bamboo's own; the thread must live to abort
                    traceback.print_exc()
                del task
