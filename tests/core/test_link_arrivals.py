"""Messages of links and their receives, through any epochs: what was sent in the reader's epoch arrives once, in order.

The sender and the reader enter epochs at their own times. A fence drops what the sender has not sent, also the rest of
a message; what the reader gets of an older epoch it drops, and what is of a newer one waits until it has entered that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.core.errors import InvariantError
from engine.core.links import Frame, Incoming, Mailbox, is_state
from tests.core.link_bytes import OURS, Classes, End, Sent, stream_of
from tests.looped import looped

KEYS = (1, 2, 5)  # aside, of the lane of state, aside


class Read(NamedTuple):
    """The reader gets so many bytes of what is under way."""

    size: int


class Fence(NamedTuple):
    """The sender enters the next epoch, between two messages."""


class Enter(NamedTuple):
    """The reader enters the next epoch of which it has not heard yet."""


class Post(NamedTuple):
    """The reader posts a receive."""

    key: int


sends = st.builds(
    lambda key, size, piece, cut: (key, size, piece, cut),
    st.sampled_from(KEYS),
    st.sampled_from([0, 1, 60, 120]),
    st.sampled_from([1000, 60, 25]),
    st.sampled_from([None, None, 0, 1, 2]),
)
moves = st.lists(
    st.one_of(
        sends,
        sends,
        st.builds(Read, st.sampled_from([10_000, 200, 60, 20])),
        st.sampled_from([Enter(), Fence()]),
        st.builds(Post, st.sampled_from(KEYS)),
        st.builds(Post, st.sampled_from(KEYS)),
    ),
    min_size=20,  # or its lists would be too short for an epoch to begin early
    max_size=40,
)


class Reference:
    """What should arrive: the whole messages of each epoch by key, and the receives of the present one."""

    def __init__(self) -> None:
        self.epoch = 0
        self.sent: dict[tuple[int, int], deque[bytes]] = {}
        self.posted: dict[int, int] = {}

    def pairs(self) -> list[tuple[int, bytes]]:
        """Returns the messages of the present epoch that a receive waits for."""
        return [
            (key, body)
            for key, count in self.posted.items()
            for body in list(self.sent.get((self.epoch, key), ()))[:count]
        ]


def play(given_moves: list[Any], classes: Classes = OURS) -> None:
    """Plays moves; a sender that is cut in a message goes on in the next epoch, as a fence makes it."""
    end, reference = End(classes), Reference()
    end.mailbox.enter(0)
    sender_epoch, number, under_way = 0, 0, b""
    for move in given_moves:
        match move:
            case Read():
                end.read(under_way[: move.size])
                under_way = under_way[move.size :]
            case Enter():
                _enter(end, reference)
                sender_epoch = max(sender_epoch, reference.epoch)
            case Fence():
                sender_epoch += 1
            case Post():
                end.post(move.key)
                reference.posted[move.key] = reference.posted.get(move.key, 0) + 1
            case (key, size, piece, cut):
                number += 1
                message = Sent(sender_epoch, key, bytes([number % 256]) * size, piece, cut)
                count = sum(1 for _ in Sent(sender_epoch, key, message.body, piece).frames())
                if cut is not None and cut >= count:
                    message = message._replace(cut=None)
                under_way += stream_of([message])
                if message.is_whole:
                    reference.sent.setdefault((sender_epoch, key), deque()).append(message.body)
                else:
                    sender_epoch += 1
    end.read(under_way)
    assert _by_key(end.taken) == _by_key(reference.pairs())


def _enter(end: End, reference: Reference) -> None:
    """Enters the next epoch; what has arrived before is compared, of which some may still be under way."""
    expected = _by_key(reference.pairs())
    for key, bodies in _by_key(end.taken).items():
        assert bodies == expected.get(key, [])[: len(bodies)]
    reference.epoch += 1
    reference.posted = {}
    end.forget_taken()
    end.mailbox.enter(reference.epoch)


def _by_key(pairs: list[tuple[int, bytes]]) -> dict[int, list[bytes]]:
    return {key: [body for other, body in pairs if other == key] for key, _ in pairs}


@settings(max_examples=200)
@given(moves)
def test_what_was_sent_in_the_epoch_of_the_reader_arrives_once_and_in_order(given_moves: list[Any]) -> None:
    play(given_moves)


# Each of these is a small case of the property above; a planted bug must fail the one that is named after it.
OLD = [(1, 100, 100, None), Enter(), Post(1), Read(300)]
HALF = [(1, 100, 40, 1), Read(300), Enter(), (1, 100, 40, None), Post(1), Read(300)]
INSIDE = [(1, 100, 40, 1), (5, 60, 60, None), Read(300), Enter(), Post(5), Post(1)]
EARLY = [Fence(), (1, 100, 100, None), Read(300), Enter(), Post(1)]
SEVERAL = [Post(1), (1, 10, 10, None), (1, 20, 10, None), (1, 30, 10, None), Read(300), Read(300), Post(1), Post(1)]

TWO = [Post(5), Post(1), Post(1), (1, 10, 5, None), (1, 10, 5, None)]  # both receives have memory of this size
OTHER_SIZE = [Post(1), (1, 60, 60, None)]


@looped("case", [OLD, HALF, INSIDE, EARLY, SEVERAL, TWO, OTHER_SIZE])
def test_a_case(case: list[Any]) -> None:
    play(case)


class DeliversOld(Incoming[bytearray]):
    """Knows no epochs."""

    def begins(self, frame: Frame, floor: int) -> bytearray | None:
        """Takes each piece."""
        return super().begins(frame, 0)


class TakesOld(Mailbox[int, bytearray]):
    """Gives a message of an older epoch to a receive."""

    def put(self, source: int, key: int, epoch: int, room: bytearray) -> int | None:
        """Takes any message for one of the present epoch."""
        return super().put(source, key, self.epoch, room)


class CompletesHalf(Incoming[bytearray]):
    """Completes a half message by whatever comes next."""

    def begins(self, frame: Frame, floor: int) -> bytearray | None:
        """Goes on in the memory that is there."""
        known = self.open.get(is_state(frame.key))
        if known is not None and frame.start == 0:
            self._now = known
            return known[1]
        return super().begins(frame, floor)


class LosesEarly(Mailbox[int, bytearray]):
    """Forgets at a fence what came early."""

    def enter(self, epoch: int) -> None:
        """Begins anew."""
        super().enter(epoch)
        self._early = {}


class KeepsOne(Mailbox[int, bytearray]):
    """Keeps the newest early message of a key only."""

    def put(self, source: int, key: int, epoch: int, room: bytearray) -> int | None:
        """Forgets the one before."""
        receive = super().put(source, key, epoch, room)
        for address, kept in self._early.items():
            self._early[address] = deque(list(kept)[-1:])
        return receive


class GivesLast(Mailbox[int, bytearray]):
    """Gives a message the memory of the last receive of its key instead of the first."""

    def room_for(self, source: int, frame: Frame) -> bytearray | None:
        """Gives memory that several messages get."""
        posted = self._posted.get((source, frame.key))
        room = posted[-1][1] if posted else None
        return room if room is not None and len(room) == frame.total else None


class MeetsOld(Mailbox[int, bytearray]):
    """Lets a whole message of any epoch meet a receive."""

    def meet(self, source: int, epoch: int, key: int, size: int) -> tuple[int, bytearray] | None:
        """Takes each message for one of the present epoch."""
        return super().meet(source, self.epoch, key, size)


class MeetsOtherSize(Mailbox[int, bytearray]):
    """Lets a whole message meet a receive with memory of another size."""

    def meet(self, source: int, epoch: int, key: int, size: int) -> tuple[int, bytearray] | None:
        """Takes the first receive."""
        posted = self._posted.get((source, key)) if epoch == self.epoch else None
        return posted.popleft() if posted else None


@looped(
    ("case", "classes"),
    [
        (TWO, Classes(mailbox=GivesLast)),
        (OLD, Classes(mailbox=MeetsOld)),
        (OTHER_SIZE, Classes(mailbox=MeetsOtherSize)),
        (OLD, Classes(incoming=DeliversOld, mailbox=TakesOld)),
        (HALF, Classes(incoming=CompletesHalf)),
        (INSIDE, Classes(incoming=CompletesHalf)),
        (EARLY, Classes(mailbox=LosesEarly)),
        (SEVERAL, Classes(mailbox=KeepsOne)),
    ],
)
def test_planted_bugs_are_found(case: list[Any], classes: Classes) -> None:
    with pytest.raises((AssertionError, InvariantError, ValueError)):
        play(case, classes)


@pytest.mark.parametrize("planted", [LosesEarly, KeepsOne, GivesLast])
def test_the_property_finds_planted_bugs_too(planted: Callable[[], Mailbox[int, bytearray]]) -> None:
    @settings(max_examples=150, database=None, derandomize=True, phases=[Phase.generate])
    @given(moves)
    def planted_property(given_moves: list[Any]) -> None:
        play(given_moves, Classes(mailbox=planted))

    with pytest.raises((AssertionError, ExceptionGroup)):
        planted_property()


def test_a_message_of_a_newer_epoch_begins_inside_of_an_older_one_that_the_reader_still_awaits() -> None:
    """The sender was fenced in the middle, and has entered the next epoch; the reader has not heard of it."""
    end = End()
    end.mailbox.enter(4)
    end.post(1)
    end.read(stream_of([Sent(4, 1, bytes(100), 30, cut=2), Sent(5, 1, b"new"), Sent(5, 1, b"next")]))
    assert end.taken == []
    end.mailbox.enter(5)
    end.post(1, 1)
    assert end.taken == [(1, b"new"), (1, b"next")]


def test_a_mailbox_awaits_what_is_posted_and_has_not_come() -> None:
    box: Mailbox[str, bytes] = Mailbox()
    box.enter(1)
    assert box.take_early(7, 1) is None
    box.post(7, 1, "wanted", b"")
    assert box.awaits(7) and not box.awaits(8)
    assert box.put(7, 1, 1, b"x") == "wanted"
    assert not box.awaits(7)
    box.put(7, 1, 2, b"early")
    box.put(8, 1, 2, b"kept")
    box.forget(7)  # another worker has its number
    box.enter(2)
    assert box.take_early(7, 1) is None
    box.post(7, 1, "wanted", b"")
    assert (box.take_early(8, 1), box.take_early(8, 1)) == (b"kept", None)
    box.enter(3)
    assert not box.awaits(7), "receives of a group that was left"


def test_a_message_comes_into_the_memory_of_its_receive_if_that_has_its_size() -> None:
    box: Mailbox[str, bytearray] = Mailbox()
    box.enter(1)
    first, second = bytearray(10), bytearray(20)
    box.post(7, 1, "one", first)
    box.post(7, 1, "other", second)
    assert box.room_for(7, Frame(1, 1, 10, 0, 10)) is first
    assert box.room_for(7, Frame(1, 1, 20, 0, 20)) is None, "it is not the first"
    assert box.room_for(7, Frame(2, 1, 10, 0, 10)) is None, "of a newer epoch"
    assert box.room_for(8, Frame(1, 1, 10, 0, 10)) is None
    box.put(7, 1, 1, first)
    assert box.room_for(7, Frame(1, 1, 20, 0, 20)) is second
