"""Frames between hosts: there and back, and any other bytes are refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.codec.messages import encode
from engine.core.errors import InvariantError
from engine.core.hosts import host_messages
from engine.core.hosts.host_messages import WorkerSign
from engine.core.message_kinds import MAX_BYTES, Message
from engine.core.messages import HeartbeatMessage, KeyMessage, PingMessage
from engine.runtime.agent.frames import (
    MOST_BYTES,
    frame,
    read_frame,
    read_from_coordinator,
    read_from_host,
    sign_frames,
)
from tests.looped import looped

HEARTBEAT = encode(HeartbeatMessage(1, 5, 7, True)).decode()
SIGN = WorkerSign(3, HEARTBEAT, (5, 7, "0F1"), (1, 5, 9, 1, 10**6, 2 * 10**6, 0), ("R", 12, 34), 2, 10**7)
HEADERS: list[Message] = [
    host_messages.HelloHostMessage("a", "1f", 3),
    host_messages.HelloReplyHostMessage(2),
    host_messages.ForkHostMessage(1, 0, 4),
    host_messages.ForkedHostMessage(1, 4711),
    host_messages.ForkFailedHostMessage(1, "no memory"),
    host_messages.SignalHostMessage(1, 9),
    host_messages.EndedHostMessage(1, -9),
    host_messages.SignsHostMessage(4, 5, (SIGN,)),
    host_messages.TickHostMessage(9, 10, (11, 12)),
    host_messages.ProcessesHostMessage(((1, 0, 4711),), 12),
    host_messages.LeavesHostMessage(),
    host_messages.OutcomeHostMessage(3, "failed: a\nb"),
]


@looped("header", HEADERS)
def test_a_frame_travels(header: Message) -> None:
    assert read_frame(frame(header)) == (header, b"")


def test_a_control_message_travels_behind_its_header() -> None:
    packet = encode(KeyMessage(3, "group/0", "a\nb"))
    for header in (
        host_messages.ControlHostMessage(7),
        host_messages.DecisionHostMessage(12),
        host_messages.PastDecisionHostMessage(12),
        host_messages.PastControlHostMessage(),
    ):
        assert read_frame(frame(header, packet)) == (header, packet)
    assert read_frame(frame(HEADERS[7]))[0].signs[0] == SIGN  # type: ignore[attr-defined]


def test_the_longest_control_message_has_room_and_a_longer_frame_is_refused() -> None:
    header = host_messages.ControlHostMessage(10**9)
    assert len(frame(header, b"x" * MAX_BYTES)) <= MOST_BYTES
    with pytest.raises(InvariantError, match="too long"):
        frame(header, b"x" * MOST_BYTES)
    with pytest.raises(InvariantError, match="at most"):
        read_frame(frame(header)[:-1] + b" " * MOST_BYTES)


@looped(
    "data",
    [
        b"",
        b"\n",
        b"{}",
        encode(PingMessage()),  # a message, but none between hosts
        encode(host_messages.ControlHostMessage(1)),  # without the control message
        encode(host_messages.DecisionHostMessage(1)),  # without the line
        encode(host_messages.TickHostMessage(1, 2)) + b"\n{}",  # with one
        encode(host_messages.TickHostMessage(1, 2))[:-1],
        b'{"kind":"tickhost","received":"1","sent_ns":1,"heard":[]}',
        b'{"kind":"tickhost","received":1,"sent_ns":1,"heard":[],"more":2}',
    ],
)
def test_a_frame_of_another_form_is_refused(data: bytes) -> None:
    with pytest.raises(InvariantError):
        read_frame(data)


@given(st.binary(max_size=200))
def test_no_bytes_raise_another_error(data: bytes) -> None:
    with contextlib.suppress(InvariantError):
        read_frame(data)


@looped("header", [*HEADERS, host_messages.ProcessesHostMessage(((1, 0, 4711), (2, 1, 4712, -9)), 0)])
def test_a_frame_goes_one_way(header: Message) -> None:
    ways = {read_from_host: host_messages.FromOtherHost, read_from_coordinator: host_messages.ToOtherHost}
    for read, of in ways.items():
        if isinstance(header, of):
            assert read(frame(header)) == (header, b"")
        else:
            with pytest.raises(InvariantError, match="goes the other way"):
                read(frame(header))


def test_words_of_workers_and_to_them_go_both_ways() -> None:
    header, packet = host_messages.ControlHostMessage(1), encode(KeyMessage(3, "group/0", "a"))
    assert read_from_host(frame(header, packet)) == read_from_coordinator(frame(header, packet)) == (header, packet)


@given(st.lists(st.integers(), max_size=9), st.lists(st.integers() | st.text(max_size=3), max_size=4), st.text())
def test_no_sign_raises_another_error(place: list[int], times: list[int | str], text: str) -> None:
    parts: Any = {"place": tuple(place), "times": tuple(times)}
    sign = SIGN._replace(heartbeat=text, **parts)
    with contextlib.suppress(InvariantError):
        read_from_host(encode(host_messages.SignsHostMessage(1, 2, (sign,))))


@pytest.mark.parametrize("num_workers", [0, 1, 40, 256])
def test_signs_of_many_workers_that_all_tell_their_counts_fit_their_frames(num_workers: int) -> None:
    counts = tuple((peer, 10**6, 10**6, 10**6) for peer in range(num_workers))
    heartbeat = encode(HeartbeatMessage(1, 5, 7, False, 10**9, counts)).decode()
    signs = [SIGN._replace(process=process, heartbeat=heartbeat) for process in range(num_workers)]
    headers = [read_frame(each)[0] for each in sign_frames(4, 5, signs)]
    assert headers and all(isinstance(each, host_messages.SignsHostMessage) for each in headers)
    assert [each[0] for header in headers for each in header.signs] == [*range(num_workers)]  # type: ignore[attr-defined]
