"""Gathering of checkpoints: whole with every part and with hashes that agree, and in no other case."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

from engine.core.checkpoints import gathering
from engine.core.checkpoints.gathering import DISPUTED, INCOMPLETE, Gathered, Gathering, GivenUp, Whole
from engine.core.checkpoints.manifest import LayerHash, Part

HASHES = tuple(LayerHash(layer, "a", "b") for layer in range(2))
PARTS = (Part(0, 0, 2, "a", 1, ""), Part(0, 1, 2, "b", 1, ""), Part(1, 0, 1, "c", 1, ""))
Event = Callable[[Gathering], Gathered]


def part(step: int, each: Part) -> Event:
    return lambda now: gathering.add_part(now, step, each)


def closes(step: int, hashes: tuple[LayerHash, ...] = HASHES) -> Event:
    return lambda now: gathering.close(now, step, hashes)


def after(*events: Event, begun: tuple[int, ...] = (4,)) -> list[Whole | GivenUp]:
    now, found = Gathering(), list[Whole | GivenUp]()
    for step in begun:
        now = gathering.begin(now, step)
    for event in events:
        now, more = event(now)
        found += more
    return found


def check_order(events: tuple[Event, ...]) -> None:
    """Asserts that a checkpoint is whole with the last of all events, and not before."""
    assert after(*events[:-1]) == []
    assert after(*events) == [Whole(4, HASHES, PARTS)]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_checkpoint_is_whole_with_its_last_part_or_its_hashes(order: tuple[int, ...]) -> None:
    events = (*(part(4, each) for each in PARTS), closes(4))
    check_order(tuple(events[at] for at in order))


def test_planted_a_manifest_before_the_hashes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    is_whole = property(lambda self: len(self.parts) == len(PARTS))
    monkeypatch.setattr(gathering.Unfinished, "is_whole", is_whole)
    with pytest.raises(AssertionError):
        check_order((*(part(4, each) for each in PARTS), closes(4)))


def test_a_step_whose_hashes_differ_or_lack_is_given_up_and_its_late_parts_change_nothing() -> None:
    parts = [part(4, each) for each in PARTS]
    assert after(*parts, closes(4, ()), *parts, closes(4)) == [GivenUp(4, DISPUTED)]


def test_of_two_files_with_one_part_the_first_counts() -> None:
    again = Part(1, 0, 1, "other", 1, "")
    found = after(closes(4), part(4, PARTS[2]), part(4, again), part(4, PARTS[0]), part(4, PARTS[1]))
    assert found == [Whole(4, HASHES, PARTS)]


def test_a_step_that_is_not_kept_has_no_checkpoint() -> None:
    assert after(*(part(3, each) for each in PARTS), closes(3)) == []


def test_a_step_that_was_given_up_is_not_begun_again() -> None:
    def again(now: Gathering) -> Gathered:
        return gathering.begin(now, 4), ()

    events = (lambda now: gathering.give_up(now, 4, "a disk is full"), again)
    assert after(*events, closes(4), *(part(4, each) for each in PARTS)) == [GivenUp(4, "a disk is full")]


def test_a_whole_checkpoint_settles_the_older_ones() -> None:
    found = after(closes(5), *(part(5, each) for each in PARTS), part(4, PARTS[0]), begun=(4, 5))
    assert found == [GivenUp(4, INCOMPLETE), Whole(5, HASHES, PARTS)]


def test_the_oldest_of_many_that_lack_a_part_is_given_up() -> None:
    assert after(closes(4), begun=(4, 5, 6, 7, 8)) == [GivenUp(4, INCOMPLETE)]


def test_at_the_end_all_others_are_given_up() -> None:
    assert after(closes(4), gathering.give_up_all, begun=(4, 6)) == [GivenUp(4, INCOMPLETE), GivenUp(6, INCOMPLETE)]
