"""The process of a worker on another host, as this host sees it."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.codec.messages import encode
from engine.core.hosts.host_messages import WorkerSign
from engine.core.messages import HeartbeatMessage, PingMessage
from engine.core.protocol.events import HostWord
from engine.runtime.agent import remote_workers, session, worker_handles
from engine.runtime.agent.remote_workers import RemoteProcess
from engine.runtime.agent.worker_handles import WorkerHandle, sights_of
from engine.runtime.process import spawner
from engine.runtime.process.fork_client import Child
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.spawner import HostMailbox

S = 1_000_000_000


def test_a_process_is_unseen_when_two_signs_of_life_have_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_ns = 5 * S
    monkeypatch.setattr(remote_workers, "now_ns", lambda: clock_ns)
    child = RemoteProcess(1, 0, lambda frame: None, HostMailbox())
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


def test_the_signs_of_a_host_are_one_decision_of_a_tick_and_no_message_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_ns = 5 * S
    monkeypatch.setattr(remote_workers, "now_ns", lambda: clock_ns)
    monkeypatch.setattr(worker_handles, "now_ns", lambda: clock_ns)
    board, mailbox = ProgressBoard.create(3), HostMailbox()
    members = []
    for worker in range(3):
        child = RemoteProcess(worker, worker, lambda frame: None, mailbox)
        members.append(WorkerHandle(worker, (), child, child.link, Path("log"), host="b"))
    try:
        beat = HeartbeatMessage(1, 0, 4, True)
        heartbeat = encode(beat).decode()
        for each in members:
            assert isinstance(each.child, RemoteProcess)
            place = (1, 0, 4, 1, S // 5, 0, 0)
            each.child.sees(WorkerSign(each.worker, heartbeat, (0, 0, ""), place, ("S", 1, 1), 0, S // 10))
        clock_ns += S // 2  # the next signs are late: nothing grows
        sights, unseen, words = sights_of(members, board, range(3))
        assert words == dict.fromkeys(range(3), HostWord(S // 10, beat))
        assert {each.inside_ns for each in sights.values()} == {S // 5}
        assert unseen == ()
        assert sights_of(members, board, range(3))[2] == dict.fromkeys(range(3), HostWord(S // 10)), (
            "a heartbeat is told once"
        )
        assert mailbox.take() == [], "a message would be a decision for each"
    finally:
        board.close()


def test_a_host_that_says_more_than_is_taken_has_to_wait_and_its_words_stay_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spawner, "_MOST_WAITING", 2)
    mailbox = HostMailbox()
    child = RemoteProcess(1, 0, lambda frame: None, mailbox)
    words = [bytes([number]) for number in range(5)]

    def stream() -> None:
        for word in words:
            child.hear(word)
        child.ended(-9)
        child.hear(b"late")

    thread = threading.Thread(target=stream, daemon=True)
    thread.start()
    taken: list[object] = []
    while -9 not in taken:
        assert select.select([mailbox], [], [], 10)[0]
        news = mailbox.take()
        assert len(news) <= 3, "two messages, and the end"
        taken += [each for _, each in news]
    thread.join(10)
    assert (taken, mailbox.take()) == ([*words, -9], [])


def test_a_host_whose_words_are_read_no_more_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawner, "_MOST_WAITING", 1)
    mailbox = HostMailbox()
    child = RemoteProcess(1, 0, lambda frame: None, mailbox)
    child.hear(b"first")
    thread = threading.Thread(target=child.hear, args=(b"second",), daemon=True)
    thread.start()
    mailbox.close()
    thread.join(10)
    assert not thread.is_alive()


def test_the_news_of_a_process_that_is_no_worker_of_this_start_count_for_nothing() -> None:
    """One that could not be started has ended, and one that was left behind may end later."""
    mailbox, heard = HostMailbox(), list[object]()
    failed, running = (RemoteProcess(number, number, lambda frame: None, mailbox) for number in (1, 2))
    failed.ended(-9)
    running.hear(encode(PingMessage()))
    agent = cast(Any, SimpleNamespace(hear=lambda member, message: heard.append((member, message))))
    session._take_news(agent, {running: cast(Any, "member")}, mailbox)
    assert heard == [("member", PingMessage())]
