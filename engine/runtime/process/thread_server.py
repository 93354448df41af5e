"""The server of a job in one process: each child is a thread that runs the code of a worker.

The agent, its records, its links and its deadlines are those of every run. These differ: SIGKILL ends a child in its
next wait or before its next action; other signals have no effect; the output of the workers goes to stderr; they all
share the limits, the caches and the modules of this process.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import ExitCode, ensure, required
from engine.runtime.process.fork_client import Child
from engine.runtime.process.link import Link
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.spawner import Spawner, start_linked

_WORKERS = "engine.runtime.worker.thread_worker"  # imported late, as the fork server does: it imports torch


class ThreadChild(Child):
    """A worker thread; its `pid` is the number of the thread, its `pidfd` an event that its end sets."""

    def __init__(self, name: str, worker: Any):
        self._worker = worker
        ended_fd = os.eventfd(0)
        self._ended_fd = os.dup(ended_fd)
        self._has_ended = threading.Event()
        self._exit_code = int(ExitCode.INTERNAL)
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        super().__init__(name, required(thread.native_id, "a thread that runs has a number"), ended_fd)

    def signal(self, number: signal.Signals) -> None:
        """Ends the thread at SIGKILL, in its next wait or before its next action; ignores other signals."""
        if number is signal.SIGKILL:
            self._worker.kill()

    def wait(self, timeout_s: float = 0.0) -> int | None:
        """Returns the exit code, -9 if the thread was killed; None if it does not end within `timeout_s`."""
        return self._exit_code if self._has_ended.wait(timeout_s) else None

    def _run(self) -> None:
        try:
            self._exit_code = self._worker.run()
        finally:
            self._has_ended.set()
            os.eventfd_write(self._ended_fd, 1)
            os.close(self._ended_fd)


class ThreadServer(Spawner):
    """Starts workers as threads of this process, as a context."""

    def __init__(self) -> None:
        workers = importlib.import_module(_WORKERS)
        self._worker_of, self._turn = workers.WorkerThread, workers.Turn()
        self._children: list[ThreadChild] = []
        self._life, self._named = object(), set[str]()

    @property
    def pid(self) -> int:
        """The pid of this process."""
        return os.getpid()

    def start_worker(
        self, worker: int, log: Path, fds: Sequence[int], board: ProgressBoard, role: str = "worker"
    ) -> tuple[Child, Link]:
        """Starts a thread that runs a worker; `fds` begin with those of its records and progress board.

        A worker that was there before begins a new life of all workers, who form groups with each other only.
        """
        ensure(role == "worker", f"a thread runs a worker, not {role}")
        return start_linked(self._start, role, worker, log, fds)

    def _start(self, role: str, name: str, log_fd: int, fds: Sequence[int]) -> Child:
        if name in self._named:
            self._life, self._named = object(), set()
        self._named.add(name)
        self._children.append(ThreadChild(name, self._worker_of(fds, self._life, self._turn)))
        return self._children[-1]

    def close(self) -> None:
        """Ends the threads."""
        for child in self._children:
            child.close()
