"""What the benchmark of schedules compares: every schedule on stages that sleep, its dry run, and torch's of that name.

Rules: the dry run costs what the stages of that very iteration took on average, and transfers nothing. The first stage,
whose input needs no gradient, has all of a split backward in the part for the weights; no case is longer for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.bench_rows import Stamps, mean_sleeps
from engine.core.dry_run import dry_run
from engine.core.job import Job
from engine.core.list_schedule import op_costs
from engine.core.ownership import Ownership
from engine.core.program import Program, on_owners
from engine.core.schedules.registry import SCHEDULES
from engine.core.transfer_pass import with_transfers

# With the same lists as ours, but for zb1p: of one stage per worker torch's is that too, in an order of its own.
TORCH_NAMES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-flexible": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb1p": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
# Stages that sleep say nothing of those that run two actions at once, and torch runs these one after the other.
WITHOUT_PEER = tuple(name for name in SCHEDULES if name not in TORCH_NAMES)
WIDTH = 256  # of the timed layers and of what enters them, so that nothing need be widened
_WORKERS, _MICROBATCHES, _MOST_STAGES = 4, 8, 2


def timed_job(schedule: str, num_workers: int, microbatches: int, stages_per_worker: int = 1) -> Job:
    """Returns a job of stages that sleep."""
    stages = num_workers * stages_per_worker
    return Job(
        model="timed",
        model_args={"layers": stages, "width": WIDTH},
        data_args={"features": WIDTH},
        stages=stages,
        stages_per_worker=stages_per_worker,
        microbatches=microbatches,
        schedule=schedule,
        redundancy="none",
    )


def schedule_jobs() -> dict[str, Job]:
    """Returns the cases, name -> job: each schedule with two stages per worker if it takes them, else with one."""
    jobs = {}
    for name in TORCH_NAMES:
        v = _MOST_STAGES if SCHEDULES[name].takes(_MOST_STAGES) else 1
        case = f"{name} P={_WORKERS} V={v} M={_MICROBATCHES}"
        jobs[case] = timed_job(name, _WORKERS, _MICROBATCHES, v)
    return jobs


def peer_name(schedule: str) -> str:
    """Returns what a table calls torch's schedule."""
    return f"torch's {TORCH_NAMES[schedule]}" + (", in its own order" if schedule == "zb1p" else "")


def timed_program(job: Job, ownership: Ownership) -> Program:
    """Returns what is timed: the forwards, backwards and transfers of a step of a job with a named schedule."""
    num_workers = job.stages // job.stages_per_worker
    lists = SCHEDULES[job.schedule](num_workers, job.microbatches, job.stages_per_worker)
    return with_transfers(on_owners(lists, ownership), ownership)


def predicted_seconds(program: Program, ownership: Ownership, workers: Sequence[Stamps]) -> float:
    """Returns how long the dry run of a program takes with the sleeps of one iteration."""
    forward_s, backward_s = mean_sleeps(workers)
    costs = op_costs(forward_s, backward_s, backward_s / 2)
    return dry_run(program, ownership, lambda action: costs.get(action.op, 0.0)).makespan
