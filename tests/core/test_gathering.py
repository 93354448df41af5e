"""Gathering of checkpoints: whole with every part and with hashes that agree, and in no other case."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

from engine.core import checkpoint_rules
from engine.core.checkpoint_rules import (
    DISPUTED,
    INCOMPLETE,
    AbandonedCheckpoint,
    CompleteCheckpoint,
    Gathered,
    Gathering,
)
from engine.core.manifest import LayerHash, Part
from engine.core.messages import CommitMessage, EpochMessage, GoMessage

HASHES = tuple(LayerHash(layer, "a", "b") for layer in range(2))
PARTS = (Part(0, 0, 2, "a", 1, ""), Part(0, 1, 2, "b", 1, ""), Part(1, 0, 1, "c", 1, ""))
Event = Callable[[Gathering], Gathered]


def part(step: int, each: Part) -> Event:
    return lambda now: checkpoint_rules.add_part(now, step, each)


def closes(step: int, hashes: tuple[LayerHash, ...] = HASHES) -> Event:
    return lambda now: checkpoint_rules.close(now, step, hashes)


def ordered(step: int) -> Event:
    return lambda now: (checkpoint_rules.order(now, CommitMessage(step, 1.0, "step", keep=True), step), ())


def epoch(step: int, go: GoMessage | None = None) -> Event:
    """A new epoch after the commit of a step; with `go`, the missing parts of that step are ordered."""
    told = EpochMessage(2, (0,), gather=False, regroup=True, commit=None, digest=None, go=go)
    return lambda now: (checkpoint_rules.order(now, told, step), ())


def after(*events: Event, begun: tuple[int, ...] = (4,)) -> list[CompleteCheckpoint | AbandonedCheckpoint]:
    now, found = Gathering(), list[CompleteCheckpoint | AbandonedCheckpoint]()
    for step in begun:
        now, _ = ordered(step)(now)
    for event in events:
        now, more = event(now)
        found += more
    return found


def check_order(events: tuple[Event, ...]) -> None:
    """Asserts that a checkpoint is whole with the last of all events, and not before."""
    assert after(*events[:-1]) == []
    assert after(*events) == [CompleteCheckpoint(4, HASHES, PARTS)]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_checkpoint_is_whole_with_its_last_part_or_its_hashes(order: tuple[int, ...]) -> None:
    events = (*(part(4, each) for each in PARTS), closes(4))
    check_order(tuple(events[at] for at in order))


def test_planted_a_manifest_before_the_hashes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    is_whole = property(lambda self: len(self.parts) == len(PARTS))
    monkeypatch.setattr(checkpoint_rules.PartialCheckpoint, "is_whole", is_whole)
    with pytest.raises(AssertionError):
        check_order((*(part(4, each) for each in PARTS), closes(4)))


def test_a_step_whose_hashes_differ_or_lack_is_given_up_and_its_late_parts_change_nothing() -> None:
    parts = [part(4, each) for each in PARTS]
    assert after(*parts, closes(4, ()), *parts, closes(4)) == [AbandonedCheckpoint(4, DISPUTED)]


def test_of_two_files_with_one_part_the_first_counts() -> None:
    again = Part(1, 0, 1, "other", 1, "")
    found = after(closes(4), part(4, PARTS[2]), part(4, again), part(4, PARTS[0]), part(4, PARTS[1]))
    assert found == [CompleteCheckpoint(4, HASHES, PARTS)]


def test_a_step_that_is_not_kept_has_no_checkpoint() -> None:
    assert after(*(part(3, each) for each in PARTS), closes(3)) == []


def test_a_step_that_was_given_up_is_not_begun_again() -> None:
    events = (lambda now: checkpoint_rules.give_up(now, 4, "a disk is full"), ordered(4))
    assert after(*events, closes(4), *(part(4, each) for each in PARTS)) == [AbandonedCheckpoint(4, "a disk is full")]


@pytest.mark.parametrize("number", range(1, 9))
def test_no_number_of_later_checkpoints_costs_one_whose_parts_still_come(number: int) -> None:
    steps = tuple(range(4, 4 + number))
    late = [part(step, PARTS[0]) for step in steps]
    events = (*[part(step, each) for each in PARTS[1:] for step in steps], *map(closes, steps), *late)
    assert after(*events, begun=steps) == [CompleteCheckpoint(step, HASHES, PARTS) for step in steps]
    assert after(*events[:-number], *reversed(late), begun=steps) == [
        CompleteCheckpoint(s, HASHES, PARTS) for s in steps[::-1]
    ]


def all_of(step: int) -> tuple[Event, ...]:
    return closes(step), *(part(step, each) for each in PARTS)


def test_an_epoch_later_a_whole_checkpoint_settles_the_older_ones() -> None:
    found = after(epoch(5), ordered(6), *all_of(6), part(4, PARTS[0]), begun=(4, 5))
    assert found == [
        AbandonedCheckpoint(4, INCOMPLETE),
        AbandonedCheckpoint(5, INCOMPLETE),
        CompleteCheckpoint(6, HASHES, PARTS),
    ]


def test_parts_that_are_ordered_again_in_an_epoch_are_awaited() -> None:
    go = GoMessage(end=False, validate=False, keep=True)
    for orders in ((epoch(5, go),), (epoch(5), lambda now: (checkpoint_rules.order(now, go, 5), ()))):
        found = after(*orders, ordered(6), *all_of(6), *all_of(5), begun=(4, 5))
        assert found == [
            AbandonedCheckpoint(4, INCOMPLETE),
            CompleteCheckpoint(6, HASHES, PARTS),
            CompleteCheckpoint(5, HASHES, PARTS),
        ]


def test_at_the_end_all_others_are_given_up() -> None:
    assert after(closes(4), checkpoint_rules.give_up_all, begun=(4, 6)) == [
        AbandonedCheckpoint(4, INCOMPLETE),
        AbandonedCheckpoint(6, INCOMPLETE),
    ]
