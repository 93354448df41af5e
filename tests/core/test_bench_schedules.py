"""The benchmark of schedules: what it times, and what its dry run predicts from the sleeps of an iteration."""

from __future__ import annotations

import pytest

from engine.bench.figures.rows import Stamps, ideal_seconds
from engine.bench.figures.schedules import TORCH_NAMES, peer_name, predicted_by_sleeps, schedule_jobs, timed_program
from engine.core.action import Op
from engine.core.config.job import Job
from engine.core.config.job_rules import check_job
from engine.core.config.job_wants import fresh_ownership
from engine.core.schedules.registry import SCHEDULES

MS = 1_000_000


def iteration(job: Job) -> list[Stamps]:
    """Returns the stamps of workers whose layers sleep 10 ms forward and 20 ms backward, in two parts."""
    num_forwards = job.microbatches * job.stages_per_worker
    return [Stamps(0, 0, (9 * MS, 11 * MS) * (num_forwards // 2), (10 * MS,) * 2 * num_forwards)] * 4


def predicted(case: str) -> float:
    job = schedule_jobs()[case]
    ownership = fresh_ownership(job)
    overlaps = SCHEDULES[job.schedule].overlaps
    return predicted_by_sleeps(timed_program(job, ownership), ownership, iteration(job), overlaps)


def test_every_schedule_is_timed_and_has_a_peer() -> None:
    jobs = schedule_jobs()
    assert [job.schedule for job in jobs.values()] == [*SCHEDULES]
    assert {*TORCH_NAMES} == {*SCHEDULES}
    assert [name for name in SCHEDULES if "pairs" in peer_name(name)] == ["dualpipev-overlapped"]
    assert all(check_job(job) == [] and job.stages == 4 * job.stages_per_worker for job in jobs.values())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_dry_run_of_a_plain_schedule_is_the_ideal(schedule: str) -> None:
    case = f"{schedule} P=4 V=1 M=8"
    assert predicted(case) == pytest.approx(ideal_seconds(iteration(schedule_jobs()[case]))) == pytest.approx(0.33)


def test_the_parts_of_a_backward_cost_half_of_it_each() -> None:
    assert predicted("zb1p P=4 V=1 M=8") == pytest.approx(8 * 0.03 + 3 * 0.01)
    assert predicted("zbv P=4 V=2 M=8") == pytest.approx(16 * 0.03 + 3 * 0.01)


def test_pairs_are_timed_as_pairs() -> None:
    overlapped, one_by_one = (predicted(f"{name} P=4 V=2 M=8") for name in ("dualpipev-overlapped", "dualpipev"))
    assert overlapped < one_by_one - 0.05


def test_alone_the_first_microbatch_goes_through_all_stages_and_back() -> None:
    for job in schedule_jobs().values():
        ownership = fresh_ownership(job)
        actions = [action for line in timed_program(job, ownership, lone=True).values() for action in line]
        assert {action.microbatch for action in actions} == {0}
        assert sorted(action.stage for action in actions if action.op is Op.F) == [*range(job.stages)]
        assert sorted(action.stage for action in actions if action.op in (Op.B, Op.I)) == [*range(job.stages)]
