"""Signals to a worker of another host: what its host saw before a signal proves nothing about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from engine.core.hosts.host_messages import SignalHostMessage, SignsHostMessage, WorkerSign
from engine.runtime.agent import host_workers
from engine.runtime.agent.frames import read_frame
from engine.runtime.agent.host_workers import HeartbeatReporter, LocalProcess
from engine.runtime.agent.remote_workers import UNKNOWN, RemoteProcess
from engine.runtime.agent.wire import StreamEnd
from engine.runtime.process.fork_client import Child
from engine.runtime.process.link import Link
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.spawner import HostMailbox

RUNS = ("R", 5, 5)


@pytest.fixture(name="board")
def _board() -> Iterator[ProgressBoard]:
    board = ProgressBoard.create(1)
    yield board
    board.close()


@pytest.fixture(name="away")
def _away() -> tuple[RemoteProcess, list[bytes]]:
    """Returns a worker of another host, and the frames that are sent to its host."""
    sent: list[bytes] = []
    return RemoteProcess(1, 0, sent.append, HostMailbox()), sent


@pytest.fixture(name="own")
def _own(tmp_path: Path) -> Iterator[LocalProcess]:
    """Returns a process of this host that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    link, far = Link.pair(blocking=False)
    child = Child("bamboo-0", process.pid, os.pidfd_open(process.pid))
    yield LocalProcess(1, 0, child, link)
    process.kill()
    process.wait(10)
    child.close()
    for each in (link, far):
        each.close()


def sign(state: str, num_signals: int) -> WorkerSign:
    return WorkerSign(1, "", (0, 0, ""), None, (state, 5, 5), num_signals)


def test_a_stop_is_seen_by_a_look_after_its_signal_only(away: tuple[RemoteProcess, list[bytes]]) -> None:
    child, sent = away
    assert child.state() == UNKNOWN
    child.sees(sign("T", 0))
    assert child.state() == "T"
    child.signal(signal.SIGCONT)
    child.signal(signal.SIGSTOP)
    assert [read_frame(each)[0] for each in sent] == [SignalHostMessage(1, number) for number in (18, 19)]
    child.sees(sign("T", 0))  # it was on its way; this is the stop before
    child.sees(sign("T", 1))
    assert child.state() == UNKNOWN
    child.sees(sign("T", 2))
    assert child.state() == "T"
    child.ended(-9)
    assert child.state() is None


def test_the_place_of_a_worker_comes_before_its_end(
    away: tuple[RemoteProcess, list[bytes]], board: ProgressBoard
) -> None:
    child, _ = away
    child.sees(WorkerSign(1, "", (7, 3, "1B2"), None, RUNS))
    child.ended(-9)
    child.sees(WorkerSign(1, "", (8, 4, "1F0"), None, RUNS))  # a late one
    assert child.progress(0, board).action == "1B2"


def signs_in(end: StreamEnd) -> list[WorkerSign]:
    connection = end.connect()
    end.resume(connection, 0)
    end.close()
    found = [read_frame(each)[0] for each in chain.from_iterable(end.bundles(connection))]
    return [each for one in found if isinstance(one, SignsHostMessage) for each in one.signs]


def test_a_host_tells_at_once_that_a_worker_stands_still(
    own: LocalProcess, board: ProgressBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_workers, "_STOPS_S", 10.0)  # a busy machine may stop it later than a host waits
    end = StreamEnd()
    own.num_signals = 9  # from the host that coordinated before
    signs = HeartbeatReporter(board, lambda: [own])
    try:
        signs.follow(end)
        assert own.num_signals == 0
        signs.signal(own, signal.SIGSTOP)
        told = signs_in(end)
    finally:
        signs.close()
    assert ("T", 1) in {(each.times[0], each.num_signals) for each in told if each.times}
    assert all(each.times and each.times[0] != "T" for each in told if not each.num_signals)


def test_all_workers_of_a_host_are_told_in_one_message(own: LocalProcess, board: ProgressBoard) -> None:
    end, signs = StreamEnd(), HeartbeatReporter(board, lambda: [own, own, own])
    try:
        signs.follow(end)
        until_s = time.monotonic() + 10
        while not end._unheard and time.monotonic() < until_s:
            time.sleep(0.01)
    finally:
        signs.close()
    connection = end.connect()
    end.resume(connection, 0)
    first = read_frame(next(end.bundles(connection))[0])[0]
    assert isinstance(first, SignsHostMessage)
    assert len(first.signs) == 3


def test_time_in_which_its_host_stood_still_is_no_silence_of_a_worker(
    own: LocalProcess, board: ProgressBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    stood_ns = [0]
    for module in (host_workers, host_workers):
        monkeypatch.setattr(module, "now_ns", lambda: time.monotonic_ns() + stood_ns[0])
    end, signs = StreamEnd(), HeartbeatReporter(board, lambda: [own])
    try:
        time.sleep(0.3)  # it has looked once
        stood_ns[0] = 20_000_000_000
        signs.follow(end)
        until_s = time.monotonic() + 10
        while len(end._unheard) < 2 and time.monotonic() < until_s:
            time.sleep(0.01)
    finally:
        signs.close()
    assert all(each.age_ns < 5_000_000_000 for each in signs_in(end))
