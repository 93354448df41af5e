"""Keeps a private etcd running: restarts it on its data and its socket if it ends.

Rules: only the main thread may start etcd, but that thread may be blocked in a call to it. The restart therefore runs
in the handler of SIGCHLD: Python runs it in the main thread, even inside a gRPC call, which checks for signals several
times a second. An etcd that ends right after its start is not restarted; the calls then reach their deadlines.
"""

from __future__ import annotations

import contextlib
import signal
import time
from types import FrameType

from engine.core.errors import EnvironmentLacksError, StorageError
from engine.core.history.process_records import StoreEndedRecord
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.process.subprocesses import is_readable
from engine.runtime.store.embedded_etcd import EmbeddedEtcd

_MIN_LIFE_S = 0.3


class StoreKeeper:
    """A context that restarts `etcd` when it ends; use it in the main thread."""

    def __init__(self, etcd: EmbeddedEtcd, recorder: Recorder):
        self._etcd = etcd
        self._recorder = recorder
        self._started_s = float("-inf")
        self._is_starting = False

    def __enter__(self) -> StoreKeeper:
        self._before = signal.signal(signal.SIGCHLD, self._look)
        self._start_again()  # it may have ended before the handler was set
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGCHLD, self._before)

    def _look(self, number: int, frame: FrameType | None) -> None:
        # The signal may come during this handler, or for another child.
        if not self._is_starting:
            self._is_starting = True
            self._start_again()
            self._is_starting = False

    def _start_again(self) -> None:
        while is_readable(self._etcd.pidfd) and time.monotonic() - self._started_s > _MIN_LIFE_S:
            self._started_s = time.monotonic()
            self._recorder.write(StoreEndedRecord())
            with contextlib.suppress(EnvironmentLacksError, StorageError, OSError):
                self._recorder.settle()  # it starts on a disk that answers
                self._etcd.start()
