"""Disturbed links as pure decisions: which bytes pass when, and how many frames a fault has met."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.core.links import Disturbance, Flow, FrameCount, Way
from tests.core.link_bytes import Sent, stream_of

STREAM = stream_of([Sent(0, 1, b"abc"), Sent(0, 2, b""), Sent(0, 3, bytes(100), piece=30)])  # 6 frames


def flow(way: Way = "there", **fields: Any) -> Flow:
    return Flow(way, Disturbance(**fields), 0, FrameCount())


def passes(held: Flow, now_ns: int) -> bytes:
    """Returns all that may pass at a time, a few bytes at once."""
    found = b""
    while data := held.due(now_ns):
        found += data[:7]
        held.passed(min(7, len(data)))
    return found


@pytest.mark.parametrize("size", [1, 47, 48, 49, 1000])
def test_frames_are_counted_in_any_chunks(size: int) -> None:
    count = FrameCount()
    for at in range(0, len(STREAM), size):
        count.put(STREAM[at : at + size])
    assert count.whole == 6


@pytest.mark.parametrize("begun", [20, 50])
def test_a_count_may_begin_inside_a_frame(begun: int) -> None:
    known = FrameCount(STREAM[:begun]) if begun < 48 else FrameCount(left=51 - begun)
    known.put(STREAM[begun:])
    assert known.whole == 6


def test_a_delay_keeps_the_order_and_loses_nothing() -> None:
    held = flow(kind="delay", by_ns=100, for_ns=50)
    for now_ns in range(0, len(STREAM)):
        held.put(STREAM[now_ns : now_ns + 1], now_ns)
    assert [passes(held, now_ns) for now_ns in (99, 100, 120)] == [b"", STREAM[:1], STREAM[1:21]]
    assert held.due_ns == 121
    assert passes(held, 1000) == STREAM[21:]
    assert held.due_ns == math.inf
    assert held.num_met == 1, "the first frame has begun before the end, and ended behind it"
    held = flow(kind="delay", by_ns=100)
    for at in range(0, len(STREAM), 60):
        held.put(STREAM[at : at + 60], at)
    assert held.num_met == 6


def test_a_stall_holds_all_until_its_end() -> None:
    held = flow(kind="stall", for_ns=50)
    held.put(STREAM[:60], 10)
    held.put(STREAM[60:], 60)
    assert (passes(held, 49), held.num_met, held.keeps_end) == (b"", 2, False)
    assert passes(held, 60) == STREAM
    for_good = flow(kind="stall")
    for_good.put(STREAM, 10)
    assert for_good.due_ns == math.inf


def test_a_reset_passes_no_frame_to_its_end() -> None:
    held = flow(kind="reset")
    held.put(STREAM[:51], 10)
    assert held.is_over and held.num_met == 1
    assert passes(held, 10) == STREAM[:50]


def test_the_other_way_is_not_disturbed() -> None:
    for kind in ("delay", "stall", "reset"):
        held = flow("back", kind=kind, direction="there", by_ns=100)
        held.put(STREAM, 10)
        assert passes(held, 10) == STREAM
        assert (held.num_met, held.is_over) == (0, False)
