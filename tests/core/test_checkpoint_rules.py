"""Which commits are kept, which worker writes each stage, and which checkpoints may go."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
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
    KeepRule,
    Ladder,
    StateShare,
    keeping_of,
    keeps_last,
    may_go,
    next_rung,
    shares_of,
    writers,
)
from engine.core.errors import ExitCode
from engine.core.manifest import LayerHash, Part
from engine.core.ownership import Grid, Ownership, Redundancy, fresh, with_shadows
from tests.looped import looped

MINUTE_NS = 60 * 10**9


@looped(
    ("text", "keeping"),
    [
        ("100", KeepRule(every_steps=100)),
        ("10m", KeepRule(every_ns=10 * MINUTE_NS)),
        (" end ", KeepRule()),
        ("0", KeepRule(last=False)),
        ("0s", None),
        ("-1", None),
        ("1.5", None),
        ("", None),
        ("\u0661", None),
        ("often", None),
    ],
)
def test_a_rule_is_spelled_in_one_word(text: str, keeping: KeepRule | None) -> None:
    assert keeping_of(text) == keeping


@pytest.mark.parametrize(
    ("text", "kept"), [("3", [2, 5, 8, 9]), ("end", [9]), ("0", []), ("1", [*range(10)]), ("90s", [1, 3, 5, 7, 9])]
)
def test_commits_are_kept_by_steps_by_time_and_at_the_end(text: str, kept: list[int]) -> None:
    keeping = keeping_of(text)
    assert keeping is not None
    found, before_ns = [], 0
    for step in range(10):  # each takes a minute
        now_ns = (step + 1) * MINUTE_NS
        if keeping.is_kept(step, step == 9, now_ns - before_ns):
            before_ns = now_ns
            found.append(step)
    assert found == kept


@pytest.mark.parametrize("redundancy", ["none", "lazy", "eager", "reroute"])
def test_each_stage_is_written_once_by_a_worker_that_holds_it(redundancy: Redundancy) -> None:
    for stages, pipelines, level in itertools.product((1, 2, 4, 8), (1, 2, 3), (1, 2)):
        plain = fresh(Grid(stages, 4, pipelines))
        ownership = with_shadows(plain, redundancy, level, plain.workers())
        chosen = writers(ownership)
        assert list(chosen) == list(range(stages))
        for stage, (writer,) in chosen.items():
            holders = {each for pipeline in range(pipelines) for each in ownership.replicas(pipeline, stage)}
            assert writer in holders
            shadows = holders - set(ownership.owners_of(stage))
            assert not shadows or writer in shadows
        counts = [sum(writer == worker for (writer,) in chosen.values()) for worker in ownership.workers()]
        most = -(-stages // len(counts)) if redundancy != "none" else -(-stages // len(set(plain.owners)))
        assert max(counts) <= max(1, most)


def test_a_thousand_workers_with_three_shadows_each_write_one_stage_each() -> None:
    ownership = with_shadows(fresh(Grid(1024, 2)), "lazy", 3, range(1024))
    assert sorted(writers(ownership).values()) == [(worker,) for worker in range(1024)]


def test_pipelines_share_the_work() -> None:
    assert writers(fresh(Grid(4, 4, 2))) == {0: (0,), 1: (1,), 2: (2,), 3: (3,)}
    both = fresh(Grid(4, 4, 2), stages_per_worker=4)
    assert sorted(writers(both).values()) == [(0,), (0,), (1,), (1,)]


def test_a_replica_of_each_shard_writes_it() -> None:
    ownership = fresh(Grid(2, 4, 3, fsdp=1))
    assert writers(ownership) == {0: (0, 2, 4), 1: (1, 3, 5)}
    shadowed = replace(ownership, shadows=((1,), (0,), (3,), (), (5, 1), (4,)))
    assert writers(shadowed) == {0: (1, 3, 5), 1: (0, 3, 4)}
    heirs = replace(shadowed, owners=(0, 0, 2, 3, 4, 5), shadows=((),) * 6)
    assert shares_of(heirs, 0) == (StateShare((0, 0), 0, 3), StateShare((0, 1), 0, 3))
    both = Ownership(Grid(1, 4, 2, fsdp=1), (0, 0))
    assert shares_of(both, 0) == (StateShare((0, 0), 0, 2), StateShare((1, 0), 1, 2))


def test_old_ones_go_but_never_the_newest_good_one_or_one_in_use() -> None:
    every = range(6)
    assert may_go(every, 2, every) == (0, 1, 2, 3)
    assert may_go(every, 2, every, in_use=[1]) == (0, 2, 3)
    assert may_go(every, 1, [0, 3]) == (0, 1, 2)
    assert may_go(every, 2, [0, 3]) == ()
    assert may_go(every, 0, [4]) == (0, 1, 2, 3)
    assert may_go(every, 3, []) == ()


# Gathering of checkpoints: whole with every part and with hashes that agree, and in no other case.


HASHES = tuple(LayerHash(layer, "a", "b") for layer in range(2))
PARTS = (Part(0, 0, 2, "a", 1, ""), Part(0, 1, 2, "b", 1, ""), Part(1, 0, 1, "c", 1, ""))
Event = Callable[[Gathering], Gathered]


def part(step: int, each: Part) -> Event:
    return lambda now: checkpoint_rules.add_part(now, step, each)


def closes(step: int, hashes: tuple[LayerHash, ...] = HASHES) -> Event:
    return lambda now: checkpoint_rules.close(now, step, hashes)


def ordered(step: int) -> Event:
    return lambda now: (checkpoint_rules.order(now, step), ())


def epoch(now: Gathering) -> checkpoint_rules.Gathered:
    """A new epoch."""
    return checkpoint_rules.begin_epoch(now), ()


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


@looped("order", list(permutations(range(4))))
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


@looped("number", range(1, 9))
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
    found = after(epoch, ordered(6), *all_of(6), part(4, PARTS[0]), begun=(4, 5))
    assert found == [
        AbandonedCheckpoint(4, INCOMPLETE),
        AbandonedCheckpoint(5, INCOMPLETE),
        CompleteCheckpoint(6, HASHES, PARTS),
    ]


def test_parts_that_are_ordered_again_in_an_epoch_are_awaited() -> None:
    found = after(epoch, ordered(5), ordered(6), *all_of(6), *all_of(5), begun=(4, 5))
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


# The ladder: a run goes on from checkpoints a few times in an hour, then stops so that it can be resumed.


S = 1_000_000_000


def test_without_a_good_checkpoint_the_state_is_lost() -> None:
    assert next_rung(Ladder(3), None, 0) == (Ladder(3), ExitCode.STATE_LOST)


def test_a_run_goes_on_until_its_restarts_are_used_up() -> None:
    ladder, codes = Ladder(2), []
    for at_s in (10, 20, 30):
        ladder, code = next_rung(ladder, 5, at_s * S)
        codes.append(code)
    assert codes == [None, None, ExitCode.STOPPED_RESUMABLE]
    assert next_rung(Ladder(0), 5, 0)[1] is ExitCode.STOPPED_RESUMABLE


def test_restarts_count_for_an_hour() -> None:
    ladder = Ladder(1, (10 * S,))
    assert next_rung(ladder, 0, 3609 * S)[1] is ExitCode.STOPPED_RESUMABLE
    assert next_rung(ladder, 0, 3610 * S)[1] is None


def test_the_last_step_is_kept_after_ends_that_leave_its_state_as_it_was() -> None:
    kept = {ExitCode.NOT_FINITE, ExitCode.USAGE, ExitCode.NOT_RECOVERED, ExitCode.COORDINATOR_UNAVAILABLE}
    assert {code for code in ExitCode if keeps_last(code)} == kept
