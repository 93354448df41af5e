"""The process of a worker on another host, as this host sees it."""

from __future__ import annotations

import os
import socket

import pytest

from engine.core.hosts.host_messages import WorkerSign
from engine.runtime.hosts import away_child
from engine.runtime.hosts.away_child import AwayChild
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.process.fork_client import Child

S = 1_000_000_000


def test_a_process_is_unseen_when_two_signs_of_life_have_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_ns = 5 * S
    monkeypatch.setattr(away_child, "now_ns", lambda: clock_ns)
    here, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    board = ProgressBoard.create(1)
    child = AwayChild("bamboo-0", 1, 0, far.fileno(), board.fd, lambda frame: None)
    try:
        seen = []
        for sign_comes in (False, True, False, False, True):
            clock_ns += S // 2
            if sign_comes:
                child.sees(WorkerSign(1, "", (0, 0, "")))
            seen.append(child.is_unseen)
        assert seen == [False, False, False, True, False]
        own = Child("bamboo-1", os.getpid(), os.pidfd_open(os.getpid()))
        assert not own.is_unseen
        os.close(own.pidfd)
    finally:
        child.ended(0)
        child.close()
        board.close()
        here.close()
        far.close()
