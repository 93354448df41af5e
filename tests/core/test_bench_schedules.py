"""The schedules of the pipeline benchmark: each is measured, beside torch's schedule of the same name."""

from __future__ import annotations

from engine.bench.figures import REMARKS, TORCH_NAMES, schedule_job, timed_program
from engine.bench.session import pipeline_jobs
from engine.core.action import Op
from engine.core.job.job_rules import check_job
from engine.core.job.partition import fresh_ownership
from engine.core.ownership import directions_of
from engine.core.program.schedules import SCHEDULES
from tests.looped import looped


def test_every_schedule_is_measured_and_has_a_peer() -> None:
    """Torch has no schedule in two directions."""
    assert {job.schedule for job in pipeline_jobs().values()} == {*TORCH_NAMES}
    assert {*TORCH_NAMES} == {name for name in SCHEDULES if directions_of(name) == 1}
    assert [name for name in SCHEDULES if "pairs" in REMARKS.get(name, "")] == [
        "interleaved-paired",
        "dualpipev-overlapped",
    ]
    shapes = [case.removeprefix("eager-") for case in pipeline_jobs() if case.startswith("eager-1f1b ")]
    assert shapes == [case for case in pipeline_jobs() if case.startswith("1f1b ")], "the ones that 1F1B is measured on"
    for job in map(schedule_job, TORCH_NAMES):
        assert check_job(job) == [] and job.stages == 4 * job.stages_per_worker


@looped("schedule", TORCH_NAMES)
def test_forwards_and_backwards_of_every_stage_are_timed(schedule: str) -> None:
    job = schedule_job(schedule)
    actions = [action for line in timed_program(job, fresh_ownership(job)).values() for action in line]
    firsts = [action for action in actions if action.microbatch == 0]
    assert sorted(action.stage for action in firsts if action.op is Op.F) == [*range(job.stages)]
    assert sorted(action.stage for action in firsts if action.op in (Op.B, Op.I)) == [*range(job.stages)]
