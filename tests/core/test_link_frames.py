"""Frames of links: whatever the cuts between reads, what was sent arrives; what no sender sends is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import InvariantError
from engine.core.links import HEADER_BYTES, MOST_BYTES, Frame, FrameReader, Incoming, aligned, unpacked
from tests.core.link_bytes import OURS, Classes, End, Sent, stream_of


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
    place = bytearray(100)
    reader = FrameReader(lambda frame: memoryview(place)[: frame.length], size=64, direct=50)
    header = Frame(0, 1, 100, 0, 100).packed()
    reader.room()[: len(header)] = header
    assert not list(reader.filled(len(header)))
    room = reader.room()
    assert room.obj is place and len(room) == 100
    assert not list(reader.filled(60))
    assert reader.room().obj is not place and reader.rest == (b"", 40)  # it is small
    small = body(40) + Frame(0, 2, 0, 0, 0).packed()[:20]
    reader.room()[: len(small)] = small
    assert [frame.key for frame in reader.filled(len(small))] == [1]
    assert place[60:] == body(40) and reader.rest == (Frame(0, 2, 0, 0, 0).packed()[:20], 0)


def test_a_frame_is_its_48_bytes() -> None:
    frame = Frame(1, 2, 90, 30, 60)
    assert len(frame.packed()) == HEADER_BYTES == 48
    assert unpacked(frame.packed()) == frame and frame.inline == 60
    assert frame._replace(offset=0).inline == 0
    assert [aligned(each) for each in (0, 1, 64, 65)] == [0, 64, 64, 128]


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    "piece",
    [
        ONE,  # it begins again
        Frame(5, 2, 10, 0, 10),  # another one begins inside of it
        Frame(5, 1, 10, 5, 5),  # a gap
        Frame(5, 1, 10, 3, 5),  # some bytes twice
        Frame(5, 2, 10, 4, 6),  # of another key
        Frame(5, 1, 11, 4, 6),  # of another size
        Frame(6, 1, 10, 4, 6),  # of another epoch
    ],
)
def test_a_piece_out_of_order_is_refused(piece: Frame) -> None:
    refuses(piece, Incoming)


def refuses(piece: Frame, kind: Callable[..., Incoming[bytearray]]) -> None:
    incoming = kind(lambda frame: bytearray(frame.total))
    assert incoming.begins(ONE, 5) is not None
    assert incoming.ended(ONE, 5) is None
    with pytest.raises(InvariantError):
        incoming.begins(piece, 5)


def test_the_rest_of_nothing_is_refused() -> None:
    with pytest.raises(InvariantError, match="out of order"):
        Incoming(lambda frame: bytearray(frame.total)).begins(Frame(5, 1, 10, 4, 6), 5)


class Forgetful(FrameReader):
    """Forgets what has come of a header: a planted bug."""

    def filled(self, count: int) -> Iterator[Frame]:
        """Yields frames, and drops what is left over."""
        yield from super().filled(count)
        self._have = 0


class Unasked(Incoming[bytearray]):
    """Takes any piece for the next one: a planted bug."""

    def begins(self, frame: Frame, floor: int) -> bytearray | None:
        """Takes the memory that is there."""
        return super().begins(frame, floor) if self._open is None else self._open[1]


def test_a_reader_that_loses_half_a_header_is_found() -> None:
    with pytest.raises((AssertionError, InvariantError)):
        survives_each_cut(256, 64, Classes(reader=Forgetful))


def test_an_end_that_takes_any_piece_is_found() -> None:
    with pytest.raises(pytest.fail.Exception):
        refuses(Frame(5, 1, 10, 5, 5), Unasked)
