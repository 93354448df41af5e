"""Keeps a private etcd running: one that has ended is started again, on its data and its port.

Rules: only the main thread may start it, and just then the main thread may be waiting for it in a call. So the kernel's
signal brings the news: Python runs the handler in the main thread, also in the middle of a call of gRPC, which looks
for signals several times a second. One that ends as soon as it has started is left alone: the calls then run out.
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from types import FrameType, TracebackType

from engine.core.errors import EnvironmentLacksError
from engine.core.history.process_records import StoreEndedRecord
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.store.embedded_etcd import EmbeddedEtcd

_MIN_LIFE_S = 0.3


class StoreKeeper:
    """Keeps a started etcd, as a context; use it in the main thread."""

    def __init__(self, etcd: EmbeddedEtcd, recorder: Recorder):
        self._etcd = etcd
        self._recorder = recorder
        self._started_s = float("-inf")
        self._is_starting = False

    def __enter__(self) -> StoreKeeper:
        self._before = signal.signal(signal.SIGCHLD, self._look)
        self._start_again()  # it may have ended before anyone looked
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGCHLD, self._before)

    def _look(self, number: int, frame: FrameType | None) -> None:
        # The signal may come while this very handler runs, or for another child.
        if not self._is_starting:
            self._is_starting = True
            self._start_again()
            self._is_starting = False

    def _start_again(self) -> None:
        while self._has_ended() and time.monotonic() - self._started_s > _MIN_LIFE_S:
            self._started_s = time.monotonic()
            self._recorder.write(StoreEndedRecord())
            with contextlib.suppress(EnvironmentLacksError, OSError):
                self._etcd.start()

    def _has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._etcd.pidfd, select.POLLIN)
        return bool(poll.poll(0))
