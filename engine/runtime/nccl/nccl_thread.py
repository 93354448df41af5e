"""The one thread of a worker that calls NCCL, for all of its communicators: two threads in NCCL at once are forbidden.

It does its tasks in their order: so an epoch's communicator is aborted before the next one is connected. Between two
tasks it looks at its communicators: whether the ranks of one have joined, and whether the present one has failed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable

from engine.runtime.process.network_namespace import inside

_LOOK_EVERY_S = 0.1
_LOOK_WHILE_JOINING_S = 0.001
Look = Callable[[], bool]  # whether ranks are joining


class NcclThread:
    """The tasks of one worker for NCCL; its sockets lie in the `network` of the run, if it has one."""

    def __init__(self, name: str, network: int | None = None):
        self._name, self._network = name, network
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._looks: list[Look] = []
        self._due_s = 0.0  # of the next look, by the clock

    def give(self, task: Callable[[], None]) -> None:
        """Has a task done behind those that were given before; any thread may call."""
        self._tasks.put(task)
        with self._starting:
            if self._thread is None:  # a worker that waits for its first group needs none
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def watch(self, look: Look) -> None:
        """Has this thread, which calls, look now and then."""
        self._looks.append(look)
        self._due_s = 0.0

    def unwatch(self, look: Look) -> None:
        """Ends the looks; called by this thread."""
        self._looks = [each for each in self._looks if each != look]

    def end(self) -> None:
        """Ends the thread behind the tasks that were given."""
        self._tasks.put(None)

    def _run(self) -> None:
        with contextlib.nullcontext() if self._network is None else inside(self._network):
            while True:
                left_s = self._due_s - time.monotonic()
                if left_s <= 0:
                    _done(self._look)
                    continue
                try:
                    task = self._tasks.get(timeout=left_s)
                except queue.Empty:
                    continue
                if task is None:
                    return
                _done(task)
                del task

    def _look(self) -> None:
        self._due_s = time.monotonic() + _LOOK_EVERY_S
        answers = [look() for look in self._looks]
        if any(answers):
            self._due_s = time.monotonic() + _LOOK_WHILE_JOINING_S


def _done(task: Callable[[], None]) -> None:
    try:
        task()
    except Exception:  # a mistake of bamboo's own; the thread must live to abort
        traceback.print_exc()
