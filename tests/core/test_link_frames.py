"""Frames of links: whatever the cuts between reads, what was sent arrives; what no sender sends is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import InvariantError
from engine.core.links import (
    HEADER_BYTES,
    IN_ORDER,
    MOST_BYTES,
    STATE,
    Frame,
    FrameReader,
    Incoming,
    RingSpace,
    aligned,
    is_state,
    key_of,
    unpacked,
)
from tests.core.link_bytes import OURS, Classes, End, Sent, stream_of
from tests.doubles.faulty_links import KINDS, Fate, FaultyLinks, Kind, LinkFault
from tests.looped import looped


def body(size: int, first: int = 0) -> bytes:
    return bytes((first + each) % 251 for each in range(size))


THREE = [Sent(0, 1, body(90, 1), piece=40), Sent(0, 2, b""), Sent(0, 3, body(10, 2))]
WHOLE = [(each.key, each.body) for each in THREE]
SIZES = [(48, 1), (48, 20), (256, 64), (1 << 16, 1 << 14)]  # of the buffer, and from which on a body goes straight


def read(chunks: list[bytes], size: int, direct: int, classes: Classes = OURS) -> list[tuple[int, bytes]]:
    end = End(classes, size, direct)
    end.mailbox.enter(0)
    end.post(1, 2, 3)
    for chunk in chunks:
        end.read(chunk)
    return end.taken


def survives_each_cut(size: int, direct: int, classes: Classes = OURS) -> None:
    data = stream_of(THREE)
    for at in range(len(data) + 1):
        assert read([data[:at], data[at:]], size, direct, classes) == WHOLE


@pytest.mark.parametrize(("size", "direct"), SIZES)
def test_a_read_may_end_at_every_byte(size: int, direct: int) -> None:
    survives_each_cut(size, direct)


@pytest.mark.parametrize(("size", "direct"), SIZES)
def test_two_cuts_around_every_header(size: int, direct: int) -> None:
    data = stream_of(THREE)
    for begin in range(0, len(data), 7):
        for length in (1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1):
            assert read([data[:begin], data[begin : begin + length], data[begin + length :]], size, direct) == WHOLE


@pytest.mark.parametrize(("size", "direct"), SIZES)
def test_one_byte_at_a_time(size: int, direct: int) -> None:
    assert read([bytes([each]) for each in stream_of(THREE)], size, direct) == WHOLE


messages = st.lists(
    st.builds(
        lambda key, size, piece: Sent(0, key, body(size, key), piece),
        st.integers(1, 3),
        st.integers(0, 400),
        st.integers(1, 300),
    ),
    max_size=6,
)


@given(messages, st.lists(st.integers(1, 200), min_size=1), st.sampled_from(SIZES))
def test_any_messages_in_any_chunks(sent: list[Sent], lengths: list[int], sizes: tuple[int, int]) -> None:
    data, chunks, number = stream_of(sent), list[bytes](), 0
    while data:
        length = lengths[number % len(lengths)]
        chunks.append(data[:length])
        data, number = data[length:], number + 1
    end = End(OURS, *sizes)
    end.mailbox.enter(0)
    end.post(*(each.key for each in sent))
    for chunk in chunks:
        end.read(chunk)
    assert end.taken == [(each.key, each.body) for each in sent]


def test_a_large_body_is_read_in_place_and_a_small_one_with_what_is_behind_it() -> None:
    place, ended = bytearray(100), list[Frame]()
    reader = FrameReader(
        lambda frame: memoryview(place)[: frame.length], ended.append, lambda epoch, key, body: False, 64, 50
    )
    header = Frame(0, 1, 100, 0, 100).packed()
    reader.room()[: len(header)] = header
    reader.filled(len(header))
    room = reader.room()
    assert room.obj is place and len(room) == 100
    reader.filled(60)
    assert not ended
    assert reader.room().obj is not place and reader.rest == (b"", 40)  # it is small
    small = body(40) + Frame(0, 2, 0, 0, 0).packed()[:20]
    reader.room()[: len(small)] = small
    reader.filled(len(small))
    assert [frame.key for frame in ended] == [1]
    assert place[60:] == body(40) and reader.rest == (Frame(0, 2, 0, 0, 0).packed()[:20], 0)


def test_a_frame_is_its_48_bytes() -> None:
    frame = Frame(1, 2, 90, 30, 60)
    assert len(frame.packed()) == HEADER_BYTES == 48
    assert unpacked(frame.packed()) == frame and frame.inline == 60
    assert frame._replace(offset=0).inline == 0
    assert [aligned(each) for each in (0, 1, 64, 65)] == [0, 64, 64, 128]


@looped(
    "frame",
    [
        Frame(0, 1, MOST_BYTES + 1, 0, 1),
        Frame(0, 1, 10, 0, 11),
        Frame(0, 1, 10, 5, 6),
        Frame(0, 1, 10, 10, 0),
        Frame(0, 1, 10, 0, 0),
        Frame(0, 1, 0, 1, 0),
        Frame(0, 1, 10, (1 << 64) - 1, (1 << 64) - 1),
    ],
)
def test_a_frame_that_no_sender_makes_is_refused(frame: Frame) -> None:
    with pytest.raises(InvariantError, match="no sender makes"):
        unpacked(frame.packed())


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_frame_within_bounds_or_refused(header: bytes) -> None:
    try:
        frame = unpacked(header)
    except InvariantError:
        return
    assert frame.packed() == header
    assert frame.start + frame.length <= frame.total <= MOST_BYTES


ONE = Frame(5, 1, 10, 0, 4)


@looped(
    "piece",
    [
        ONE,  # it begins again
        Frame(5, 5, 10, 0, 10),  # another one begins inside of it
        Frame(5, 1, 10, 5, 5),  # a gap
        Frame(5, 1, 10, 3, 5),  # some bytes twice
        Frame(5, 5, 10, 4, 6),  # of another key
        Frame(5, 1, 11, 4, 6),  # of another size
        Frame(6, 1, 10, 4, 6),  # of another epoch
    ],
)
def test_a_piece_out_of_order_is_refused(piece: Frame) -> None:
    refuses(piece, Incoming)


def refuses(piece: Frame, kind: Callable[..., Incoming[bytearray]]) -> None:
    incoming = kind(lambda frame: bytearray(frame.total))
    assert incoming.begins(ONE, 5) is not None
    assert incoming.ended(ONE) is None
    with pytest.raises(InvariantError):
        incoming.begins(piece, 5)


def test_pieces_of_state_come_between_those_of_another_message_and_neither_is_mixed_up() -> None:
    rooms: dict[int, bytearray] = {}
    incoming: Incoming[bytearray] = Incoming(lambda frame: rooms.setdefault(frame.key, bytearray(frame.total)))
    order, state = key_of(1, IN_ORDER), key_of(1, STATE)
    wholes = []
    for key, total, start, length in [
        (state, 9, 0, 4),
        (order, 8, 0, 5),
        (state, 9, 4, 1),
        (order, 8, 5, 3),
        (state, 9, 5, 4),
    ]:
        frame = Frame(5, key, total, start, length)
        assert incoming.begins(frame, 5) is rooms[frame.key]
        wholes.append(incoming.ended(frame))
    assert [whole is not None for whole in wholes] == [False, False, False, True, True]
    assert wholes[3] is rooms[order] and wholes[4] is rooms[state]


def begins_inside(classes: Classes) -> None:
    end = End(classes)
    end.mailbox.enter(0)
    end.post(1, 5)
    half = Sent(0, 1, bytes(100), piece=40, cut=1)
    with pytest.raises(InvariantError, match="inside another"):
        end.read(stream_of([half, Sent(0, 5, bytes(10))]))


def test_a_whole_message_inside_of_another_is_refused() -> None:
    begins_inside(OURS)


def test_an_end_that_takes_a_whole_message_inside_of_another_is_found() -> None:
    with pytest.raises(pytest.fail.Exception):
        begins_inside(Classes(reader=TakesInside))


def test_the_rest_of_nothing_is_refused() -> None:
    with pytest.raises(InvariantError, match="out of order"):
        Incoming(lambda frame: bytearray(frame.total)).begins(Frame(5, 1, 10, 4, 6), 5)


class TakesInside(FrameReader):
    """Takes a whole message inside of another one: a planted bug."""

    def __init__(self, *parts: Any):
        sink, end, _, *sizes = parts
        super().__init__(sink, end, lambda epoch, key, body: True, *sizes)


class Forgetful(FrameReader):
    """Forgets what has come of a header: a planted bug."""

    def filled(self, count: int) -> None:
        """Drops what is left over."""
        super().filled(count)
        self._have = 0


class Unasked(Incoming[bytearray]):
    """Takes any piece for the next one: a planted bug."""

    def begins(self, frame: Frame, floor: int) -> bytearray | None:
        """Takes the memory that is there."""
        known = self.open.get(is_state(frame.key))
        return super().begins(frame, floor) if known is None else known[1]


def test_a_reader_that_loses_half_a_header_is_found() -> None:
    with pytest.raises((AssertionError, InvariantError)):
        survives_each_cut(256, 64, Classes(reader=Forgetful))


def test_an_end_that_takes_any_piece_is_found() -> None:
    with pytest.raises(pytest.fail.Exception):
        refuses(Frame(5, 1, 10, 5, 5), Unasked)


# The space of a ring against a model: nothing there is written over, and no room is wasted.


SIZE = 100


def play(moves: list[int], space: RingSpace) -> None:
    """Places a piece for each positive number; each other one has the reader free the oldest piece."""
    live: deque[tuple[int, int]] = deque()
    freed = 0
    for move in moves:
        if move <= 0:
            if live:
                freed += live.popleft()[1]
            continue
        offset = space.place(move, freed)
        if offset is None:
            assert move > _room(live)
            continue
        assert 0 <= offset and offset + move <= SIZE
        assert all(offset + move <= at or at + length <= offset for at, length in live), "two pieces overlap"
        live.append((offset, move))


def _room(live: deque[tuple[int, int]]) -> int:
    """Returns the longest piece for which a ring has room: pieces lie behind one another, and wrap once."""
    if not live:
        return SIZE
    first, end = live[0][0], sum(live[-1])
    return first - end if live[-1][0] < first else max(SIZE - end, first)


lengths = st.integers(-3, SIZE + 1) | st.integers(1, 30)


@given(st.lists(lengths, max_size=60))
def test_no_piece_overlaps_another_one_and_no_room_is_wasted(moves: list[int]) -> None:
    play(moves, RingSpace(SIZE))


def test_it_wraps_and_is_full_and_begins_again_when_it_is_empty() -> None:
    space = RingSpace(SIZE)
    assert [space.place(each, 0) for each in (40, 40, 30)] == [0, 40, None]
    assert space.place(20, 0) == 80
    assert space.place(1, 0) is None
    assert space.place(30, 40) == 0  # behind the first one, which is free
    assert space.place(10, 40) == 30
    assert space.place(1, 40) is None
    assert space.place(40, 80) == 40
    assert space.place(SIZE, 80 + 20 + 30 + 10) is None
    assert space.place(SIZE, 80 + 20 + 30 + 10 + 40) == 0
    assert RingSpace(SIZE).place(SIZE + 1, 0) is None


class Hasty(RingSpace):
    """Takes what was told last for the whole of what is free: a planted bug."""

    def place(self, length: int, freed: int) -> int | None:
        """Frees one piece more than the reader has."""
        if self._placed:
            freed = max(freed, self._placed[0][2])
        return super().place(length, freed)


class Unwrapped(RingSpace):
    """Does not see that it has wrapped: a planted bug."""

    def _gap(self, length: int) -> int | None:
        end = self._placed[-1][1] if self._placed else 0
        return end if end + length <= self._size else 0


@pytest.mark.parametrize("space", [Hasty(SIZE), Unwrapped(SIZE)])
def test_planted_bugs_are_found(space: RingSpace) -> None:
    with pytest.raises(AssertionError):
        play([40, 40, 20, 0, 30, 30, 0, 30], space)


# The faulty links of the simulated network hold up, lose, delay and repeat messages as they say.


WAY, BACK = (0, 1), (1, 0)


@looped(
    ("fault", "expected"),
    [
        (LinkFault("silent", 50), [[(50, "whole")], [(50, "whole")], [(60, "whole")]]),
        (LinkFault("silent"), [[], [], []]),
        (LinkFault("late", 50, 5), [[(15, "whole")], [(25, "whole")], [(60, "whole")]]),
        (LinkFault("late", 50, 45), [[(55, "whole")], [(65, "whole")], [(65, "whole")]]),
        (LinkFault("reset", 50), [[(10, "broken")], [(20, "broken")], [(60, "whole")]]),
        (LinkFault("duplicated", 50), [[(10, "whole")] * 2, [(20, "whole")] * 2, [(60, "whole")]]),
        (LinkFault("middle", 50), [[(10, "part"), (50, "whole")], [(50, "whole")], [(60, "whole")]]),
        (LinkFault("middle"), [[(10, "part")], [], []]),
    ],
)
def test_the_fates_of_three_messages(fault: LinkFault, expected: list[list[tuple[int, str]]]) -> None:
    links = FaultyLinks()
    links.strike(WAY, fault)
    assert [[tuple(fate) for fate in links.fates(now, WAY)] for now in (10, 20, 60)] == expected
    assert links.fates(10, BACK) == (Fate(10, "whole"),), "the other way is as before"


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_overtakes_another_and_none_is_lost_after_a_silence(kind: Kind) -> None:
    links = FaultyLinks()
    links.strike(WAY, LinkFault(kind, 30, 17))
    come = [fate for now in range(60) for fate in links.fates(now, WAY) if fate.what == "whole"]
    assert [each.at for each in come] == sorted(each.at for each in come)
    assert len(come) == {"reset": 30, "duplicated": 90}.get(kind, 60)


def test_a_healed_link_and_a_new_fault_begin_anew() -> None:
    links = FaultyLinks()
    links.strike(WAY, LinkFault("middle"))
    assert [fate.what for fate in links.fates(1, WAY)] == ["part"]
    assert links.are_cut(2, (0, 1, 2))
    assert not links.are_cut(2, (1, 2))
    links.heal(WAY)
    assert links.fates(3, WAY) == (Fate(3, "whole"),)
    assert not links.are_cut(3, (0, 1))
    links.strike(WAY, LinkFault("middle", 9))
    assert [fate.what for fate in links.fates(4, WAY)] == ["part", "whole"]
    assert not links.are_cut(9, (0, 1))
