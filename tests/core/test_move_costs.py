"""The policy goes by what moves have cost in this run; before that by first guesses."""

from __future__ import annotations

from dataclasses import replace

from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes
from engine.core.ownership import Grid, Ownership
from engine.core.program.ballot import SlotVote, VoteMessage
from engine.core.protocol.assignment import assign
from engine.core.protocol.measured_facts import BYTES_PER_S, PAUSE_S, MeasuredFacts
from engine.core.protocol.worker_times import (
    MoveCosts,
    WorkerTimes,
    after_commit,
    after_epoch,
    after_vote,
    bytes_per_s,
    facts,
    heard,
    pause_s,
)

S = 1_000_000_000
SIZE = StageBytes(weights=100, whole=100, trained=100, optimizer=200, buffers=0, output=10)  # a replica has 300
SIZES = dict.fromkeys(range(12), SIZE)
OLD, NEW = (0, 0, 1, 1), (0, 0, 0, 1)


def committed(costs: MoveCosts, *at_s: float) -> MoveCosts:
    for each in at_s:
        costs = after_commit(costs, round(each * S))
    return costs


def test_before_anything_was_measured_guesses_count() -> None:
    assert (bytes_per_s(MoveCosts(), SIZES), pause_s(MoveCosts())) == (BYTES_PER_S, PAUSE_S) == (1e9, 0.05)


def test_the_rate_is_the_median_of_the_heals() -> None:
    votes = [SlotVote(0, stage, heal_ns=round(300 * S / rate)) for stage, rate in enumerate((1000, 5000, 3000))]
    costs = after_vote(MoveCosts(), VoteMessage(1, 5, (*votes, SlotVote(0, 3))))
    assert [stage for stage, _ in costs.heals] == [0, 1, 2]
    assert round(bytes_per_s(costs, SIZES)) == 3000
    assert round(bytes_per_s(costs, {0: SIZE})) == 1000, "the sizes of others are not known"
    for _ in range(40):
        costs = after_vote(costs, VoteMessage(1, 6, (SlotVote(0, 4, heal_ns=S),)))
    assert (len(costs.heals), bytes_per_s(costs, SIZES)) == (32, 300), "the last ones count"


def test_a_pause_is_the_first_step_with_other_owners_less_the_usual_ones_behind_it() -> None:
    before = committed(after_epoch(MoveCosts(), OLD, is_planned=False), 1, 2, 3)
    moved = committed(after_epoch(before, NEW, is_planned=True), 4.25, 5.25, 6.25, 7.5, 8.5)
    assert pause_s(moved) == PAUSE_S, "five steps behind it are needed"
    known = committed(moved, 9.5)
    assert (pause_s(known), known.steps_s) == (0.25, None)
    again = committed(after_epoch(known, OLD, is_planned=True), *(10 + step for step in range(6)))
    assert again.pauses_s == (0.25, 0.0), "never below 0: this first step was shorter"


def test_only_a_planned_change_of_owners_has_a_pause_and_another_epoch_ends_it() -> None:
    before = committed(after_epoch(MoveCosts(), OLD, is_planned=False), 1, 2, 3)
    for owners, is_planned in ((OLD, True), (NEW, False)):
        assert after_epoch(before, owners, is_planned=is_planned).steps_s is None
    moved = committed(after_epoch(before, NEW, is_planned=True), 9, 10)
    failed = after_epoch(moved, OLD, is_planned=False)
    assert committed(failed, *range(11, 20)).pauses_s == ()


def test_votes_tell_the_facts_of_the_policy() -> None:
    job = Job(stages=3, blocks=4, elastic=True)
    ownership = Ownership(job.grid, (0,) * 4 + (1,) * 4 + (2,) * 4)
    vote = VoteMessage(1, 5, (SlotVote(0, 4, heal_ns=S // 10),))
    times, _ = heard(WorkerTimes(sizes=SIZES), 1, vote)
    times = times._replace(costs=times.costs._replace(pauses_s=(0.2, 0.4, 0.3)))
    found = facts(times, job, ownership, (0, 1, 2), {})
    assert (round(found.bytes_per_s), found.pause_s) == (3000, 0.3)
    assert facts(times, job, ownership, (0, 1, 2), {}) == found


def test_a_move_that_cost_much_before_is_not_made_again() -> None:
    """Worker 2 takes blocks from its neighbours; a step gains 25 % of 1.2 s, and so 100 steps gain some 36 s."""
    grid = Grid(12, 8)
    times = (0.01,) * 12
    known = MeasuredFacts(times, times, replica_bytes=(1000,) * 12)
    ownership = Ownership(grid, (0,) * 5 + (1,) * 5 + (2,) * 2)
    assert assign(ownership, (0, 1, 2), known).owners != ownership.owners
    for dear in (replace(known, pause_s=1000.0), replace(known, bytes_per_s=1.0)):
        stays = assign(ownership, (0, 1, 2), dear)
        assert stays.owners == ownership.owners
        assert "would not pay for the move in 100 steps" in stays.why
