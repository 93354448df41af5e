"""The position of a worker on the board: what it tells at a move, and while data is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.core.protocol.events import Loading
from engine.runtime.process.progress_board import BoardPlace, LoaderStatus, ProgressBoard


@pytest.fixture
def board() -> Iterator[ProgressBoard]:
    made = ProgressBoard.create(3)
    yield made
    made.close()


@pytest.fixture
def at_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The present time, which the test sets."""
    now = [10]
    monkeypatch.setattr("engine.runtime.process.progress_board.now_ns", lambda: now[0])
    return now


def test_a_place_is_read_as_it_was_written_and_no_halves_of_two(board: ProgressBoard) -> None:
    place = BoardPlace(3, 2**20, 77, True, 2**60, 5, Loading.AHEAD)
    board.begin(1, 8, "1F0", (0, 7, 0, False, 0, 0))
    board.place(1, place[:-1])
    board.load(1, Loading.AHEAD, True)
    assert [board.place_of(line) for line in range(3)] == [None, place, None]
    assert (board.read(1).action, board.read(2).action) == ("1F0", "")
    board._memory[128 + 64 + 5] ^= 1
    assert board.place_of(1) is None


def test_the_slowest_action_counts_in_its_step_and_the_next(board: ProgressBoard, at_ns: list[int]) -> None:
    here = LoaderStatus(board, 0)
    seen = []
    for time_ns, move in ((20, (1, 0, 1, True)), (70, (1, 0, 1, False)), (90, (1, 0, 2, True)), (95, (1, 1, 1, True))):
        at_ns[0] = time_ns
        here.move(*move)
        seen.append(board.place_of(0))
    assert [each and (each.since_ns, each.slowest_ns) for each in seen] == [(20, 0), (70, 50), (90, 50), (95, 50)]
    at_ns[0] = 97
    here.move(1, 2, 1, True)
    place = board.place_of(0)
    assert place is not None
    assert place.slowest_ns == 2, "its own and the step before"


def test_loading_is_told_and_begins_the_time_of_an_action_again(board: ProgressBoard, at_ns: list[int]) -> None:
    here = LoaderStatus(board, 2)
    here.move(1, 0, 1, True)
    told = []
    for at_ns[0], ahead, is_loading in (
        (20, True, True),
        (30, False, True),
        (500, False, False),
        (600, True, False),
    ):
        here.load(is_loading, ahead=ahead)
        told.append(board.place_of(2))
    found = [(each.loading, each.since_ns) for each in told if each]
    assert found == [(Loading.AHEAD, 10), (Loading.MAIN, 10), (Loading.AHEAD, 500), (Loading.NONE, 500)]
