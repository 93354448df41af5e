"""Workers take turns at what nobody waits for; who has the turn may die, or be stopped, and nobody waits long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from engine.runtime.process.locks import HostLock
from engine.runtime.process.progress_board import ProgressBoard

_HOLDS = """
import sys, threading
from engine.runtime.process.locks import HostLock
with HostLock(int(sys.argv[1])).acquire_when(lambda: True, threading.Event()) as has_turn:
    print(has_turn, flush=True)
    sys.stdin.readline()
print("over", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def fd() -> Iterator[int]:
    board = ProgressBoard.create(1)
    yield board.fd
    board.close()


@pytest.fixture
def other(fd: int) -> Iterator[subprocess.Popen[str]]:
    """Has another process take the turn."""
    command = [sys.executable, "-c", _HOLDS, str(fd)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[fd]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


def takes(fd: int) -> bool:
    """Says whether this process gets the turn while the moment is always good."""
    with HostLock(fd).acquire_when(lambda: True, threading.Event()) as has_turn:
        return has_turn


def test_one_at_a_time_and_the_next_when_its_block_has_ended(fd: int, other: subprocess.Popen[str]) -> None:
    assert not takes(fd)
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write("go on\n")
    other.stdin.flush()
    assert other.stdout.readline() == "over\n"
    assert takes(fd)
    assert other.poll() is None


def test_nobody_waits_long_for_one_that_is_stopped(fd: int, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGSTOP)
    assert not takes(fd)


def test_where_it_cannot_be_had_nobody_has_it() -> None:
    with open("/dev/null", "rb") as nothing:
        closed = os.dup(nothing.fileno())
    os.close(closed)
    assert not takes(closed)


def test_who_dies_gives_the_turn_back(fd: int, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    assert takes(fd)


def test_the_moment_has_to_be_good(fd: int) -> None:
    moments = iter([False, False, True, False])
    with HostLock(fd).acquire_when(lambda: next(moments), threading.Event()) as has_turn:
        assert has_turn
    assert next(moments) is False


def test_without_a_good_moment_it_is_not_put_off_for_long(fd: int) -> None:
    begin_s, looks = time.monotonic(), list[float]()

    def look() -> bool:
        looks.append(time.monotonic())
        return False

    with HostLock(fd).acquire_when(look, threading.Event()) as has_turn:
        assert not has_turn
    assert time.monotonic() - begin_s >= 0.03
    assert len(looks) == 5, "each look costs a worker that waits for others as much as an action"


def test_who_is_in_a_hurry_does_not_wait_for_its_turn(fd: int, other: subprocess.Popen[str]) -> None:
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return True

    hurry = threading.Event()
    hurry.set()
    with HostLock(fd).acquire_when(look, hurry) as has_turn:
        assert not has_turn
    assert looks == 1
