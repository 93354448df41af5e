"""The change of the schedule of a live run: which schedules fit its job, and the owners that one needs.

Rule: all schedules train the same slots in the same order of microbatches, so a change at a step boundary changes no
bit. A worker keeps its number of stages. Only another placement moves slots, once their replicas are whole; meanwhile
the workers run their stages in the order of the list scheduler.
"""

from __future__ import annotations

from dataclasses import replace

from engine.core.errors import Problem, UserError, nearest
from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.core.ownership import Placement, fresh
from engine.core.program.schedule_csv import placement_of
from engine.core.program.schedules import SCHEDULES
from engine.core.protocol.state import State

OWN = "own"  # the name of the job's own schedule, which may have no other


def change_of(job: Job, state: State, name: str) -> tuple[str, tuple[int, ...]]:
    """Returns the schedule of a name as `WantedSchedule` has it, and the owners that its placement needs.

    Raises:
        UserError: it does not fit the job, or is in use.
    """
    schedule = "" if name in (OWN, job.schedule) else name
    if schedule and (problem := unfit(job, schedule)):
        fitting = [OWN, *(each for each in SCHEDULES if not unfit(job, each))]
        sizes = f"{job.stages_per_worker} stages per worker and {job.microbatches} microbatches"
        raise UserError([Problem("schedule", f"one that fits {sizes}: {', '.join(fitting)}", repr(name), problem)])
    if schedule == state.wanted_schedule:
        hint = "it is in use, or will be behind the next step"
        raise UserError([Problem("schedule", "another one than that of the run", repr(name), hint)])
    return schedule, placed_owners(job, schedule, state.owners)


def unfit(job: Job, schedule: str) -> str:
    """Returns what keeps a run from using a schedule, in words."""
    if schedule not in SCHEDULES:
        return nearest(schedule, SCHEDULES) or "no schedule has this name"
    problems = check_job(replace(job, schedule=schedule, placement="auto"), nccl_on_cpu=True)
    return str(problems[0]) if problems else ""


def placed_owners(job: Job, schedule: str, owners: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the owners by a schedule's placement; empty with one stage per worker, or if stages have merged."""
    if job.stages_per_worker == 1:
        return ()
    wanted = placement_of(schedule or job.schedule, job.placement if not schedule else "auto")
    placements: tuple[Placement, ...] = ("loop", "v")
    of = {each: fresh(job.grid, job.stages_per_worker, each).owners for each in placements}
    for places in of.values():
        worker_at = dict(zip(places, owners, strict=True))
        if len({*worker_at.values()}) == len(worker_at) and tuple(map(worker_at.__getitem__, places)) == owners:
            return tuple(map(worker_at.__getitem__, of[wanted]))
    return ()
