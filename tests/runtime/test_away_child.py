"""The process of a worker on another host, as this host sees it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from engine.codec.messages import encode
from engine.core.hosts.host_messages import WorkerSign
from engine.core.messages import HeartbeatMessage
from engine.core.protocol.events import HostWord
from engine.runtime.agent import worker_handles
from engine.runtime.agent.worker_handles import WorkerHandle, sights_of
from engine.runtime.hosts import remote_workers
from engine.runtime.hosts.remote_workers import RemoteProcess
from engine.runtime.ipc.link import Link
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.process.fork_client import Child

S = 1_000_000_000


def test_a_process_is_unseen_when_two_signs_of_life_have_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_ns = 5 * S
    monkeypatch.setattr(remote_workers, "now_ns", lambda: clock_ns)
    here, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    board = ProgressBoard.create(1)
    child = RemoteProcess("bamboo-0", 1, 0, far.fileno(), board.fd, lambda frame: None)
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


def test_the_signs_of_a_host_are_one_decision_of_a_tick_and_no_message_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_ns = 5 * S
    monkeypatch.setattr(remote_workers, "now_ns", lambda: clock_ns)
    monkeypatch.setattr(worker_handles, "now_ns", lambda: clock_ns)
    board = ProgressBoard.create(3)
    members = []
    for worker in range(3):
        link, far = Link.pair(blocking=False)
        child = RemoteProcess(f"bamboo-{worker}", worker, worker, far.fileno(), board.fd, lambda frame: None)
        far.close()
        members.append(WorkerHandle(worker, (), child, link, Path("log"), host="b"))
    try:
        beat = HeartbeatMessage(1, 0, 4, True)
        heartbeat = encode(beat).decode()
        for each in members:
            assert isinstance(each.child, RemoteProcess)
            place = (1, 0, 4, 1, S // 5, 0, 0)
            each.child.sees(WorkerSign(each.worker, heartbeat, (0, 0, ""), place, ("S", 1, 1), 0, S // 10))
        clock_ns += S // 2  # the next signs are late: nothing grows
        sights, unseen, words = sights_of(members, board)
        assert words == dict.fromkeys(range(3), HostWord(S // 10, beat))
        assert {each.inside_ns for each in sights.values()} == {S // 5}
        assert unseen == ()
        assert sights_of(members, board)[2] == dict.fromkeys(range(3), HostWord(S // 10)), "a heartbeat is told once"
        for each in members:
            with pytest.raises(BlockingIOError):
                each.link.receive()  # which would be a decision for each
    finally:
        for each in members:
            assert isinstance(each.child, RemoteProcess)
            each.child.ended(0)
            each.release()
        board.close()
