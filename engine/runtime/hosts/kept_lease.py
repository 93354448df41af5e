"""The lease of a host, kept by a thread of its own: no other call to the store, and no work of the host, holds it up.

Rule: a host that cannot renew its lease is gone before the lease can expire: it ends its workers and itself, whatever
else it does (`engine/core/hosts/host_lease.py`). Time counts from the sending of a renewal, and suspension counts too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from engine.core.errors import CoordinatorUnavailableError, ExitCode, LeaseLostError
from engine.core.hosts.host_lease import LeaseTime
from engine.core.store.kv import KV, Lease

_LOOK_S = 0.05


def boottime_ns() -> int:
    """Returns the time of a clock that goes on while the host is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class KeptLease:
    """A lease of the store; `end_workers` is called, from a thread, when it cannot be kept, and the process ends."""

    def __init__(self, kv: KV, ttl_s: int, end_workers: Callable[[str], None] = lambda why: None):
        self.end_workers = end_workers
        self._kv = kv
        sent_ns = boottime_ns()
        self.lease: Lease = kv.grant(ttl_s)
        self._time = LeaseTime(ttl_s * 1_000_000_000, sent_ns)
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=work, name="lease", daemon=True) for work in (self._renew, self._watch)
        ]
        for each in self._threads:
            each.start()

    def _renew(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            sent_ns = boottime_ns()
            self._end_if_late(sent_ns)  # before it asks: its workers have computed for too long already
            if sent_ns < self._time.renew_ns:
                continue
            try:
                if not self._kv.keep_alive(self.lease) and not self._is_over.is_set():
                    self._end("the lease of this host has expired, or was revoked: the run goes on without it")
                self._time = self._time.renewed(sent_ns)
            except (CoordinatorUnavailableError, LeaseLostError):
                pass  # tried again, until the time is over

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._end_if_late(boottime_ns())

    def _end_if_late(self, now_ns: int) -> None:
        if now_ns >= self._time.end_ns:
            self._end("the lease of this host could not be renewed in time")

    def _end(self, why: str) -> NoReturn:
        self.end_workers(why)
        os._exit(ExitCode.FENCED)

    @property
    def unrenewed_s(self) -> float:
        """The seconds since the sending of the last renewal that was answered."""
        return (boottime_ns() - self._time.sent_ns) / 1e9

    def close(self) -> None:
        """Gives the lease back, and with it all its keys; raises CoordinatorUnavailableError."""
        self._is_over.set()
        for each in self._threads:
            each.join()
        self._kv.revoke(self.lease)
