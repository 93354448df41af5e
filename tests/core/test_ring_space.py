"""The space of a ring against a model: nothing there is written over, and no room is wasted."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.links import RingSpace

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
