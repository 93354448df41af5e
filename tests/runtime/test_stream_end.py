"""One end of a stream: each frame comes once and in order, however often the connection breaks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain

import pytest

from engine.core.errors import InvariantError
from engine.runtime.agent.frames import MOST_BYTES
from engine.runtime.agent.wire import StreamEnd
from tests.looped import looped

pytestmark = pytest.mark.timeout(20)


class Wire:
    """Two ends, and connections between them that lose what is under way when they break."""

    def __init__(self) -> None:
        self.near, self.far = StreamEnd(), StreamEnd()
        self.heard: list[bytes] = []
        self.sent: Iterator[bytes] = iter(())
        self.far_connection = 0

    def connect(self) -> None:
        """Begins a connection; each end says how many frames it has."""
        connection = self.near.connect()
        self.far_connection = self.far.connect()
        self.near.resume(connection, self.far.received)
        self.sent = chain.from_iterable(self.near.bundles(connection))

    def carry(self, number: int, *, is_lost: bool = False) -> None:
        """Takes frames from the near end, and brings them to the far one."""
        for _ in range(number):
            frame = next(self.sent)
            if not is_lost:
                assert self.far.take(self.far_connection, lambda: self.heard.append(frame))  # noqa: B023


@looped("seed", range(50))
def test_each_frame_comes_once_and_in_order(seed: int) -> None:
    draw, wire, told = random.Random(seed), Wire(), 0  # noqa: S311
    while told < 200:
        wire.connect()
        for _ in range(draw.randrange(1, 20)):
            wire.near.send(b"%d" % told)
            told += 1
        left = told - len(wire.heard)
        come = draw.randrange(left + 1)
        wire.carry(come)
        wire.carry(draw.randrange(left - come + 1), is_lost=True)
        if draw.random() < 0.5:
            wire.near.forget(wire.far.received)
    wire.connect()
    wire.carry(told - len(wire.heard))
    assert wire.heard == [b"%d" % each for each in range(told)]


def test_an_older_connection_neither_gives_nor_takes() -> None:
    wire = Wire()
    wire.connect()
    older, before = wire.sent, wire.far_connection
    wire.connect()
    wire.near.send(b"a")
    assert list(older) == []
    assert not wire.far.take(before, lambda: wire.heard.append(b"late"))
    wire.carry(1)
    assert (wire.heard, wire.far.received) == ([b"a"], 1)


def test_the_last_frames_are_sent_before_the_end() -> None:
    wire = Wire()
    wire.connect()
    wire.near.send(b"a")
    wire.near.close()
    wire.near.send(b"too late")
    assert list(wire.sent) == [b"a"]


def test_nothing_is_kept_without_end_for_a_host_that_does_not_read() -> None:
    end, part = StreamEnd(), bytes(1 << 20)
    for _ in range(70):
        end.send(part)
    assert end.is_full
    assert 64 <= len(end._unheard) <= 66


def test_an_end_that_has_more_than_was_sent_is_no_end_of_this_stream() -> None:
    wire = Wire()
    wire.connect()
    for number in range(5):
        wire.near.send(b"%d" % number)
        if number == 1:
            wire.carry(2)
    with pytest.raises(InvariantError, match="says that it has 3 frames, and 2 were sent"):
        wire.near.forget(3)  # the third is there, and was not sent
    wire.near.forget(2)
    assert [wire.near.can_resume(each) for each in (-1, 1, 2, 5, 6)] == [False, False, True, True, False]
    with pytest.raises(InvariantError, match="has had 2 frames, and says 1"):
        wire.near.resume(wire.near.connect(), 1)


def test_frames_that_are_due_travel_together_and_a_long_one_alone() -> None:
    end = StreamEnd()
    connection = end.connect()
    end.resume(connection, 0)
    long = bytes(MOST_BYTES)
    for each in (b"a", b"b", long, b"c"):
        end.send(each)
    bundles = end.bundles(connection)
    assert [next(bundles) for _ in range(3)] == [[b"a", b"b"], [long], [b"c"]]
    assert len(end._unheard) == 4, "each counts, and is kept until the other end has it"
