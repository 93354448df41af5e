"""A schedule that hides a slow edge is wanted once the edge is measured, within the stash that the user allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.core.program.ballot import SlotVote, VoteMessage
from engine.core.program.schedule_search import length_of
from engine.core.program.schedules import SCHEDULES
from engine.core.protocol.events import Notice, StepCommitted
from engine.core.protocol.membership import step
from engine.core.protocol.schedule_policy import QUIET_STEPS, ScheduleLook, choice, look, measured
from engine.core.protocol.state import State
from engine.core.protocol.worker_times import WorkerTimes, heard
from tests.core.membership_cases import running

MS = 1_000_000
S = 1_000_000_000
JOB = Job(stages=3, microbatches=12, adapt_schedule=5)
SHIFT = (0, 7 * S, 3 * S)  # of the clocks of the workers' hosts


def after(steps: int, transfer_ms: tuple[float, float]) -> WorkerTimes:
    """Returns the times of steps whose forwards and backwards take 10 ms, with transfers between three stages."""
    times = WorkerTimes()
    for at in range(steps):
        for stage in range(3):
            ways = ((stage, 0), (stage - 1, 1), (stage - 1, 0), (stage, 1))  # its edge, and whether a value comes
            passed = []
            for edge, comes in ways:
                ends = tuple(
                    20 * MS * number + SHIFT[stage] + comes * (int(transfer_ms[edge] * MS) + number % 3 * MS)
                    for number in range(12 * (0 <= edge < 2))
                )
                passed.append(ends)
            vote = SlotVote(0, stage, took_ns=(120 * MS, 120 * MS), passed_ns=tuple(passed))
            times, _ = heard(times, stage, VoteMessage(1, at, (vote,)))
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


def test_merged_stages_have_no_schedule_to_change() -> None:
    profile = measured(JOB, running(), after(14, (2, 10)))
    assert profile is not None
    assert choice(JOB, running()._replace(owners=(0, 0, 2)), profile) is None


@pytest.mark.parametrize("job", [replace(JOB, blocks=2), replace(JOB, microbatches=2000)])
def test_jobs_that_it_cannot_adapt_are_refused(job: Job) -> None:
    assert [each.field for each in check_job(job)] == ["adapt_schedule"]
