"""The accounts of the kernel: how long a thread has waited for a core."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import pytest

from engine.runtime.process import kernel
from engine.runtime.process.kernel import CoreWaits, ProcessAccount, allow_files

_PATIENCE_S = 60
needs_accounts = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="this kernel keeps no account of waiting"
)


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


@needs_accounts
def test_a_thread_that_shares_a_core_waits_for_it(hogged_core: int) -> None:
    def computes() -> int:
        os.sched_setaffinity(0, {hogged_core})  # of this thread
        waits, end = CoreWaits(), monotonic() + _PATIENCE_S
        begun_ns = waits.total_ns()
        while waits.total_ns() - begun_ns < 20_000_000 and monotonic() < end:
            pass
        return waits.total_ns() - begun_ns

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(computes).result() >= 20_000_000


@needs_accounts
def test_the_waits_are_read_while_steps_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"wait": 0, "clock": 0}
    monkeypatch.setattr(CoreWaits, "total_ns", lambda waits: now["wait"])
    monkeypatch.setattr(kernel, "time", SimpleNamespace(monotonic_ns=lambda: now["clock"]))
    waits, found = CoreWaits(), list[bool]()
    assert waits.are_read, "from the first step on"
    for waited in [0] * 40 + [1_900_000, 2_100_000] + [0] * 40:
        now["wait"] += waited
        now["clock"] += 100_000_000
        waits.begin_step()
        found.append(waits.are_read)
    assert found == [True] * 31 + [False] * 10 + [True] * 32 + [False] * 9, "a fiftieth of a step is of note"


@needs_accounts
def test_the_account_of_a_child_has_its_state_and_its_times_until_it_has_been_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        open_before = num_open("stat")
        account, end = ProcessAccount(child.pid), monotonic() + _PATIENCE_S
        first = times = account.times()
        assert first is not None
        while times is not None and times.process_ns < first.process_ns + 50_000_000 and monotonic() < end:
            times = account.times()
        assert times is not None
        assert times.state == "R" and times.thread_ns - first.thread_ns >= 40_000_000
        child.kill()
        child.wait()
        assert account.times() is None
    account.close()
    assert account.times() is None
    assert num_open("stat") == open_before
    assert ProcessAccount(child.pid).times() is None, "there is no such process"


def test_more_files_are_allowed_up_to_the_hard_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"soft": 1024, "hard": 4096}
    monkeypatch.setattr(resource, "getrlimit", lambda of: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(resource, "setrlimit", lambda of, both: limits.update(soft=both[0]))
    for count, allowed in ((500, 1024), (2000, 2000), (1500, 2000), (9000, 4096)):
        allow_files(count)
        assert limits["soft"] == allowed


def test_a_thread_that_ends_leaves_no_descriptor() -> None:
    open_before = num_open("schedstat")
    for _ in range(3):
        CoreWaits()
    assert num_open("schedstat") == open_before


def num_open(name: str) -> int:
    """Returns how many descriptors of this process are of files with a text in their name."""
    gc.collect()  # of other tests, too
    return sum(name in _link(each) for each in Path("/proc/self/fd").iterdir())


def _link(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:  # that of the listing itself
        return ""
