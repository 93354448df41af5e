"""A schedule that hides a slow edge is wanted once the edge is measured, within the stash that the user allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.core.program.ballot import SlotVote, VoteMessage
from engine.core.program.owners import owners_compute
from engine.core.program.schedule_search import Profile, length_of, most_stash
from engine.core.program.schedules import SCHEDULES
from engine.core.protocol import schedule_policy
from engine.core.protocol.events import Notice, StepCommitted
from engine.core.protocol.membership import step
from engine.core.protocol.schedule_policy import QUIET_STEPS, ScheduleLook, choice, look, measured
from engine.core.protocol.state import State
from engine.core.protocol.worker_times import WorkerTimes, heard, with_owners
from tests.core.membership_cases import running

MS = 1_000_000
S = 1_000_000_000
JOB = Job(stages=3, microbatches=12, adapt_schedule=5)
SHIFT = (0, 7 * S, 3 * S)  # of the clocks of the workers' hosts


def after(steps: int, transfer_ms: tuple[float, float], blocks: int = 1) -> WorkerTimes:
    """Returns the times of steps whose forwards and backwards take 10 ms, with transfers between three stages."""
    times = WorkerTimes()
    for at in range(steps):
        for stage in range(3):
            votes = []
            for block in range(blocks):
                ways = ((stage, 0), (stage - 1, 1), (stage - 1, 0), (stage, 1))  # its edge, and whether a value comes
                passed = []
                for edge, comes in ways:
                    has = 0 <= edge < 2 and block == (blocks - 1 if edge == stage else 0)
                    late = int(transfer_ms[edge] * MS) if has else 0
                    ends = tuple(
                        20 * MS * number + SHIFT[stage] + comes * (late + number % 3 * MS) for number in range(12 * has)
                    )
                    passed.append(ends)
                took = 120 * MS // blocks
                told = tuple(passed) if any(passed) else ()
                votes.append(SlotVote(0, stage * blocks + block, took_ns=(took, took), passed_ns=told))
            times, _ = heard(times, stage, VoteMessage(1, at, tuple(votes)))
    return times


def running_at(committed: int) -> State:
    return running(last_step=999)._replace(committed=committed)


def test_an_edge_is_measured_without_the_clocks_of_its_ends() -> None:
    profile = measured(JOB, running(), after(14, (1, 5)))
    assert profile is not None
    assert profile.transfer == pytest.approx((0.001, 0.005))
    assert profile.forward == pytest.approx((0.01,) * 3)
    assert measured(JOB, running(), after(5, (1, 5))) is None, "too few steps"


def test_one_edge_slowed_five_times_is_hidden_by_another_schedule() -> None:
    even, slow = (measured(JOB, running(), after(14, (2, last))) for last in (2, 10))
    assert even is not None and slow is not None
    job = replace(JOB, adapt_schedule=2)
    assert choice(job, running(), even) is None
    assert choice(job, running(), slow) is None, "all that hide it stash more than two microbatches"
    found = choice(JOB, running(), slow)
    assert found is not None
    lengths = {name: length_of(SCHEDULES[name](3, 12), slow) for name in ("1f1b", found[0])}
    assert lengths["1f1b"] >= 1.2 * lengths[found[0]]
    assert "a transfer from stage 1 takes 10 ms" in found[1]


def test_slices_take_their_part_of_the_times_and_of_the_stash() -> None:
    """Twelve slices of six microbatches have the lists of twelve microbatches, but with backwards one forward later."""
    job = replace(JOB, microbatches=6, slices=2)
    profile = measured(job, running(), after(14, (2, 10)))
    assert profile is not None and profile.forward == pytest.approx((0.01,) * 3)
    found = choice(replace(job, adapt_schedule=3), running(), profile)
    assert found is not None and not SCHEDULES[found[0]].overlaps
    stash = {name: most_stash([*owners_compute(name, job.grid, (0, 1, 2)).program().values()]) for name in SCHEDULES}
    assert 4 < stash[found[0]] <= 6, "three microbatches are six slices"
    assert choice(replace(job, adapt_schedule=2), running(), profile) is None


def test_the_schedule_of_the_job_comes_back_where_it_is_as_quick() -> None:
    state = running()._replace(schedule="eager-1f1b", wanted_schedule="eager-1f1b")
    job = replace(JOB, adapt_schedule=1)
    even = measured(job, state, after(14, (0, 0)))
    assert even is not None
    found = choice(job, state, even)
    assert found is not None and found[0] == ""


def test_it_looks_seldom_and_not_while_something_else_changes() -> None:
    times = after(14, (2, 10))
    looked, wanted = look(ScheduleLook(), JOB, running_at(13), times, 5 * S)
    assert wanted is not None and looked == ScheduleLook(13, 5 * S, 13)
    state = step(running_at(13), wanted)
    assert look(ScheduleLook(), JOB, state, times, 9 * S)[1] is None, "the wish waits for its boundary"
    assert look(looked, JOB, running_at(13 + QUIET_STEPS - 1), times, 9 * S)[1] is None
    assert look(looked, JOB, running_at(13 + QUIET_STEPS), times, 9 * S)[1] is not None
    leaving = step(running_at(13), Notice(5, 2, 120 * S))
    assert look(ScheduleLook(), JOB, leaving, times, 9 * S)[1] is None
    changed = step(state, StepCommitted(6 * S, 1, 14))
    assert changed.schedule == wanted.schedule


def with_slots(owners: tuple[int, ...]) -> State:
    return running()._replace(owners=owners, shadows=((),) * len(owners))


def test_blocks_and_further_pipelines_change_no_choice() -> None:
    plain = measured(JOB, running(), after(14, (2, 10)))
    assert plain is not None
    wanted = choice(JOB, running(), plain)
    owners = (0, 0, 1, 1, 2, 2)
    for job, state in (
        (replace(JOB, blocks=2), with_slots(owners)),
        (replace(JOB, blocks=2, pipelines=2), with_slots((*owners, *(3 + each for each in owners)))),
    ):
        profile = measured(job, state, after(14, (2, 10), blocks=2))
        assert profile is not None
        assert profile.transfer == pytest.approx((0, 0.002, 0, 0.010, 0))
        found = choice(job, state, profile)
        assert found is not None and wanted is not None
        assert found[0] == wanted[0] and found[1] == wanted[1].replace("from stage 1", "from block 3")
        assert choice(replace(job, adapt_schedule=2), state, profile) is None, "a worker stashes two stages of blocks"


def test_after_a_loss_the_schedules_that_order_the_runs_of_the_others_are_compared() -> None:
    job = replace(JOB, blocks=2, adapt_schedule=12)
    owners = (0, 0, 0, 2, 2, 2)
    lost = with_slots(owners)
    profile = Profile((0.005,) * 6, (0.0025,) * 6, (0.0025,) * 6, (0, 0, 0.03, 0, 0))
    found = choice(job, lost, profile)
    assert found is not None
    assert owners_compute(found[0], job.grid, owners).is_scheduled
    apart = with_slots((0, 2, 0, 2, 2, 0))
    assert not any(owners_compute(name, job.grid, apart.owners).is_scheduled for name in SCHEDULES)
    assert choice(job, apart, profile) is None, "no schedule orders these runs"


PRESENT = ((0, 0, 0, 2, 2, 2), (0, 0, 1, 1, 2, 2), (0, 0, 0, 1, 2, 2), (2, 2, 1, 1, 0, 0), (0, 2, 0, 2, 2, 0))
SLOW_EDGES = tuple(tuple(0.03 * (edge == slow) for edge in range(5)) for slow in range(5))


def offences() -> Iterator[str]:
    """Yields each wish that is not a tenth quicker for the present owners, or that orders no runs of theirs."""
    for owners in PRESENT:
        for transfer in SLOW_EDGES:
            job = replace(JOB, blocks=2, adapt_schedule=12)
            profile = Profile((0.005,) * 6, (0.0025,) * 6, (0.0025,) * 6, transfer)
            if (wish := schedule_policy.choice(job, with_slots(owners), profile)) is None:
                continue
            orders = [owners_compute(name, job.grid, owners) for name in (wish[0], job.schedule)]
            if not orders[0].is_scheduled:
                yield f"{wish[0]} orders no runs of {owners}"
            new, now = (length_of(tuple(each.program().values()), profile) for each in orders)
            if new > 0.9 * now:
                yield f"{wish[0]} is not quicker for {owners}"


def test_a_wish_is_quicker_for_the_owners_that_blocks_have_by_now() -> None:
    assert list(offences()) == []


def test_a_policy_that_compares_the_owners_of_the_beginning_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    distinct = schedule_policy._distinct
    monkeypatch.setattr(schedule_policy, "_distinct", lambda job, _: distinct(job, (0, 0, 1, 1, 2, 2)))
    found = list(offences())
    assert any("orders no runs" in each for each in found)
    assert any("is not quicker" in each for each in found)


def test_pipelines_that_are_cut_unlike_are_compared_together() -> None:
    job = replace(JOB, blocks=2, pipelines=2, schedule="zb1p")
    profile = Profile((0.005,) * 6, (0.0025,) * 6, (0.0025,) * 6, (0, 0.002, 0, 0.010, 0))
    alike, unlike = (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5), (0, 0, 1, 1, 2, 2, 3, 4, 4, 4, 5, 5)
    assert choice(job, with_slots(alike), profile) is not None
    assert owners_compute("zb2p", job.grid, unlike).is_scheduled
    assert choice(job, with_slots(unlike), profile) is None, "worker 4 is busy for the whole step under any schedule"


def test_too_many_actions_are_not_compared_while_training_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(JOB, blocks=2, pipelines=2, schedule="zb1p", microbatches=400)
    assert check_job(job) == []
    profile = Profile((0.005,) * 6, (0.0025,) * 6, (0.0025,) * 6, (0, 0, 0, 0.1, 0))
    alike = with_slots((0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5))
    assert choice(job, alike, profile) is not None, "pipelines that are cut alike count once"
    monkeypatch.setattr(schedule_policy, "MOST_ADAPTED", 6 * 400 - 1)
    assert choice(job, alike, profile) is None


def test_other_owners_have_other_transfers() -> None:
    times = with_owners(after(14, (2, 10)), (0, 1, 2), is_planned=False)
    assert times.edges
    assert with_owners(times, (0, 1, 2), is_planned=False).edges == times.edges
    moved = with_owners(times, (0, 1, 3), is_planned=False)
    assert moved.edges == {} and moved.stages == times.stages


def test_jobs_that_it_cannot_adapt_are_refused() -> None:
    assert [each.field for each in check_job(replace(JOB, microbatches=2000))] == ["adapt_schedule"]
    assert [each.field for each in check_job(replace(JOB, microbatches=700, blocks=2))] == ["adapt_schedule"]
    assert check_job(replace(JOB, blocks=2, elastic=True)) == []
