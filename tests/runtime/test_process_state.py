"""The accounts of the kernel: how long a thread has waited for a core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import pytest

from engine.runtime.process.process_state import core_wait_ns

_PATIENCE_S = 60


@pytest.fixture
def hogged_core() -> Iterator[int]:
    """A core on which another process computes without end."""
    core = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        os.sched_setaffinity(other.pid, {core})
        try:
            yield core
        finally:
            other.kill()


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel keeps no account of waiting")
def test_a_thread_that_shares_a_core_waits_for_it(hogged_core: int) -> None:
    def computes() -> int:
        os.sched_setaffinity(0, {hogged_core})  # of this thread
        begun_ns, end = core_wait_ns(), monotonic() + _PATIENCE_S
        while core_wait_ns() - begun_ns < 20_000_000 and monotonic() < end:
            pass
        return core_wait_ns() - begun_ns

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(computes).result() >= 20_000_000
