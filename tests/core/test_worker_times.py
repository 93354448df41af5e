"""The measured times in votes, and what follows: usual times of blocks, slow workers, moves, and when none is made."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.core.action import parse_action
from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes
from engine.core.ownership import Ownership
from engine.core.program.ballot import SlotVote, VoteMessage
from engine.core.program.compute_times import ComputeTimes
from engine.core.protocol.assignment import step_time
from engine.core.protocol.rebalancing import QUIET_STEPS, Rebalancing, wish
from engine.core.protocol.state import Options, Phase, begin
from engine.core.protocol.worker_times import (
    LEAST_STEPS,
    PaceChange,
    WorkerTimes,
    are_settled,
    facts,
    heard,
    speeds,
    usual,
)

JOB = Job(stages=3, blocks=4, elastic=True, microbatches=8)
THIRDS = (0,) * 4 + (1,) * 4 + (2,) * 4
MS = 1_000_000
Factor = Callable[[int, int], float]  # takes a worker and a step; returns by how much its work takes longer


class Training:
    """A job that trains: its owners tell times, the policy is asked after each step, and its answer is carried out."""

    def __init__(self, factor: Factor, seed: int = 0, noise: float = 0.03, costs: tuple[float, ...] = (1.0,) * 12):
        self.factor, self.noise, self.costs = factor, noise, costs
        self.dice = random.Random(seed)  # noqa: S311
        known = begin(Options(stages=12, redundant=True), THIRDS, ((),) * 12, 10_000, 0)
        self.known = known._replace(phase=Phase.RUNNING, nodes=dict.fromkeys(range(3), "host"))
        self.times, self.asked = WorkerTimes(), Rebalancing(())
        self.moves: list[int] = []
        self.changes: list[PaceChange] = []
        self.why: list[str] = []

    def run(self, first: int, end: int) -> Training:
        for step in range(first, end):
            for worker in sorted({*self.known.owners}):
                times = self.factor(worker, step) * self.dice.lognormvariate(0, self.noise)
                vote = voted(self.known.owners, worker, step, [cost * times for cost in self.costs])
                self.times, changes = heard(self.times, worker, vote)
                self.changes += changes
            self.known = self.known._replace(committed=step)
            found = wish(self.asked, JOB, self.known, step, self.times)
            self.asked = found.asked
            self.why += [found.why] if found.why else []
            if found.wanted is not None:
                self.moves.append(step)
                self.known = self.known._replace(owners=found.wanted.owners)
        return self


def voted(owners: tuple[int, ...], worker: int, step: int, costs: list[float], epoch: int = 1) -> VoteMessage:
    took = [(round(8 * MS * each), round(16 * MS * each)) for each in costs]
    mine = (SlotVote(0, stage, took_ns=took[stage]) for stage, owner in enumerate(owners) if owner == worker)
    return VoteMessage(epoch, step, (*mine, SlotVote(0, 11)))  # a shadow tells no times


def slow_from(begin_step: int, times: float = 2.0, worker: int = 1) -> Factor:
    return lambda each, step: times if each == worker and step >= begin_step else 1.0


def took(texts: str, microbatches: int = 2) -> tuple[int, int]:
    times = ComputeTimes(microbatches)
    for text in texts.split():
        times.add(parse_action(text), 5)
    return times.of((0, 0))


def test_the_times_of_a_slot_are_of_its_forwards_and_backwards_of_all_microbatches() -> None:
    assert took("0F0 0F1 0B0 0B1") == (10, 10)
    assert took("0F0 0F1 0I0 0W0 0I1 0W1") == (10, 20)
    assert took("0f0 0F0 0f1 0F1 0B0 0B1") == (10, 10)
    assert took("0F0 0B0") == took("0F0 0F1 0F2 0B0 0B1 0B2") == (0, 0), "the others ran elsewhere, or twice"
    assert took("0F0 0F1 0B0") == took("0F0 0F0 0F1 0B0 0B1") == took("0F0 0F1 0I0 0W0 0I1") == took("") == (0, 0)


def test_the_wait_for_a_core_is_taken_off() -> None:
    times = ComputeTimes(1)
    for text in ("0F0", "0f0", "0B0"):
        times.add(parse_action(text), -2, has_ended=False)
        times.add(parse_action(text), 5)
    assert times.of((0, 0)) == (3, 3)


def test_a_step_forgets_the_times_of_the_one_before() -> None:
    times = ComputeTimes(1)
    times.add(parse_action("0F0"), 5)
    times.clear()
    times.add(parse_action("0F0"), 7)
    times.add(parse_action("0B0"), 9)
    assert times.of((0, 0)) == (7, 9)


def test_times_are_known_after_some_steps_and_the_first_step_does_not_count() -> None:
    run = Training(lambda worker, step: 9.0 if step == 0 else 1.0, noise=0.0).run(0, LEAST_STEPS + 1)
    assert usual(run.times, 0) is None
    assert not facts(run.times, JOB, Ownership(JOB.grid, THIRDS), (0, 1, 2), {}).in_seconds
    run.run(LEAST_STEPS + 1, LEAST_STEPS + 2)
    assert usual(run.times, 0) == pytest.approx((0.008, 0.016))
    found = facts(run.times, JOB, Ownership(JOB.grid, THIRDS), (0, 1, 2), {})
    assert found.forward_s == pytest.approx((0.001,) * 12)
    assert found.backward_s == pytest.approx((0.002,) * 12)


def test_votes_of_a_step_with_a_failure_count_once_or_not_at_all() -> None:
    run = Training(lambda worker, step: 1.0, noise=0.0).run(0, 20)
    counted = run.times.counted
    half = replace(voted(THIRDS, 1, 20, [5.0] * 12), slots=(SlotVote(0, 4, took_ns=(0, 0)),))
    times, _ = heard(run.times, 1, half)
    times, _ = heard(times, 0, voted(THIRDS, 0, 20, [7.0] * 12))
    times, _ = heard(times, 0, voted(THIRDS, 0, 20, [1.0] * 12, epoch=2))  # all vote again
    times, _ = heard(times, 0, voted(THIRDS, 0, 21, [1.0] * 12, epoch=2))
    assert times.counted == counted + 2
    assert max(max(each) for each in times.stages[0]) == pytest.approx(0.016)
    assert len(times.stages[4]) == len(times.stages[0]) - 1


def test_votes_after_lost_steps_do_not_close_a_step() -> None:
    run = Training(lambda worker, step: 1.0, noise=0.0).run(0, 20)
    times, _ = heard(run.times, 0, voted(THIRDS, 0, 5, [1.0] * 12))
    assert (times.at, times.counted) == ((1, 5), run.times.counted)


def test_a_slow_worker_is_told_relieved_within_ten_steps_and_the_step_is_near_the_best() -> None:
    run = Training(slow_from(60)).run(0, 61 + 10)
    assert [(each.step, each.worker) for each in run.changes] == [(67, 1)]
    assert len(run.moves) == 1 and run.moves[0] <= 68
    owned = [run.known.owners.count(worker) for worker in range(3)]
    assert owned == [5, 2, 5]
    measured = facts(run.times, JOB, Ownership(JOB.grid, run.known.owners), (0, 1, 2), {})
    assert measured.speed == {1: pytest.approx(0.5, abs=0.05)}
    best = min(
        step_time((0,) * a + (1,) * b + (2,) * (12 - a - b), JOB.grid, measured)
        for a in range(1, 11)
        for b in range(12 - a)
        if 12 - a - b > 0
    )
    assert step_time(run.known.owners, JOB.grid, measured) <= 1.10 * best


def test_the_samples_of_a_slow_worker_are_those_of_a_usual_one() -> None:
    run = Training(slow_from(60)).run(0, 160)
    assert [sum(usual(run.times, stage) or ()) for stage in range(12)] == pytest.approx([0.024] * 12, rel=0.1)


def test_a_worker_that_is_well_again_gets_its_blocks_back() -> None:
    run = Training(lambda worker, step: 2.0 if worker == 1 and 60 <= step < 130 else 1.0).run(0, 200)
    assert len(run.moves) == 2
    assert [run.known.owners.count(worker) for worker in range(3)] == [4, 4, 4]
    assert speeds(run.times.paces) == {}


def test_known_times_of_unequal_blocks_move_them_once() -> None:
    run = Training(lambda worker, step: 1.0, costs=(4.0, *(1.0,) * 11)).run(0, 200)
    assert len(run.moves) == 1
    assert run.known.owners.count(0) == 2
    assert are_settled(run.times, 12)


def test_a_small_gain_of_known_times_moves_nothing_and_says_so() -> None:
    run = Training(lambda worker, step: 1.0, costs=(1.4, *(1.0,) * 9, 0.6, 0.6), noise=0.0).run(0, 100)
    assert run.moves == []
    assert len(run.why) == 2 and run.why[1].startswith("nothing moves")


@pytest.mark.parametrize("seed", range(4))
def test_a_busy_machine_moves_nothing_in_a_thousand_steps(seed: int) -> None:
    assert Training(busy(seed), seed, noise=0.2).run(0, 1000).moves == []


def busy(seed: int) -> Factor:
    """Returns a machine that is slow for long times, and hits one worker for some steps now and then."""
    dice, hit, slow = random.Random(100 + seed), [0] * 3, [0]  # noqa: S311

    def factor(worker: int, _: int) -> float:
        if worker == 0:
            slow[0] = dice.randint(5, 60) if slow[0] == 0 and dice.random() < 0.01 else max(0, slow[0] - 1)
        hit[worker] = dice.randint(1, 4) if hit[worker] == 0 and dice.random() < 0.005 else max(0, hit[worker] - 1)
        return (2.0 if slow[0] else 1.0) * (2.5 if hit[worker] else 1.0)

    return factor


def flapping(seed: int) -> Factor:
    """Returns a worker whose speed changes at random moments, by a random factor."""
    dice = random.Random(seed)  # noqa: S311
    worker, longest, state = dice.randrange(3), dice.randint(2, 60), [1.0, 0]

    def factor(each: int, step: int) -> float:
        if each != worker:
            return 1.0
        if step >= state[1]:
            state[:] = dice.uniform(1.6, 4.0) if state[0] == 1.0 else 1.0, step + dice.randint(1, longest)
        return float(state[0])

    return factor


def check_flapping(seed: int) -> None:
    run = Training(flapping(seed), seed).run(0, 250)
    pairs = zip(run.moves, run.moves[1:], strict=False)
    assert all(later - move >= QUIET_STEPS for move, later in pairs), f"seed {seed}: moves after {run.moves}"
    assert {*run.known.owners} == {0, 1, 2}, f"seed {seed}: a worker has lost all blocks"


def test_a_speed_that_flaps_makes_one_move_in_fifty_steps() -> None:
    for seed in range(40):
        check_flapping(seed)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_thousands_of_speeds_that_flap_make_one_move_in_fifty_steps() -> None:
    for seed in range(3000):
        check_flapping(seed)


SIZE = StageBytes(weights=100, whole=100, trained=100, optimizer=200, buffers=0, output=10)


def test_the_memory_of_a_host_is_shared_out_and_a_worker_without_room_gets_no_block() -> None:
    ownership, times = Ownership(JOB.grid, THIRDS), WorkerTimes(sizes=dict.fromkeys(range(12), SIZE))
    found = facts(times, JOB, ownership, (0, 1, 2, 3), {}, 1200)
    assert found.replica_bytes == (300,) * 12
    assert found.owned_bytes == (400,) * 12
    assert found.memory == {0: 1900, 1: 1900, 2: 1900, 3: 300}
    assert facts(times, JOB, ownership, (0, 1, 2), {}).memory == {}
    known = begin(Options(stages=12, redundant=True), THIRDS, ((),) * 12, 99, 0)
    known = known._replace(phase=Phase.RUNNING, members=(0, 1, 2, 3))
    told = wish(Rebalancing((0, 1, 2)), JOB, known, 0, times, lambda: 1200)
    assert told.wanted is None
    assert "worker 3 gets no block: one takes" in told.why
    assert wish(Rebalancing((0, 1, 2)), JOB, known, 0, times, lambda: 4 * 1200).wanted is not None
