"""What the benchmark of schedules compares: every schedule on stages that sleep, its dry run, and torch's of that name.

Rules: there are two dry runs. To one, actions and transfers cost what `engine.bench.figures.costs` says. To the other,
which shows what all but the sleeps of the stages takes, stages cost what those of that very iteration slept on average,
and all else nothing. The first stage, whose input needs no gradient, has all of a split backward in the part for the
weights; no case is longer for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.bench.figures.rows import Stamps, mean_sleeps
from engine.core.config.job import Job
from engine.core.ownership import Ownership
from engine.core.program.build import Program, on_owners
from engine.core.program.dry_run import dry_run
from engine.core.program.list_scheduler import op_costs
from engine.core.program.transfer_pass import with_transfers
from engine.core.schedules.overlap_pairs import with_pairs_together
from engine.core.schedules.registry import SCHEDULES

# With the same lists as ours, but for zb1p: of one stage per worker torch's is that too, in an order of its own. Pairs
# of actions, which ours runs at once on stages that sleep, torch runs one after the other.
TORCH_NAMES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-flexible": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb1p": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
    "dualpipev-overlapped": "ScheduleDualPipeV",
}
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
    for name in SCHEDULES:
        v = _MOST_STAGES if SCHEDULES[name].takes(_MOST_STAGES) else 1
        case = f"{name} P={_WORKERS} V={v} M={_MICROBATCHES}"
        jobs[case] = timed_job(name, _WORKERS, _MICROBATCHES, v)
    return jobs


def peer_name(schedule: str) -> str:
    """Returns what a table calls torch's schedule."""
    remarks = {"zb1p": ", in its own order", "dualpipev-overlapped": ", which runs pairs one after the other"}
    return f"torch's {TORCH_NAMES[schedule]}{remarks.get(schedule, '')}"


def timed_program(job: Job, ownership: Ownership, lone: bool = False) -> Program:
    """Returns what is timed: the forwards, backwards and transfers of a step of a job with a named schedule.

    `lone` leaves only those of the first microbatch.
    """
    schedule = SCHEDULES[job.schedule]
    lists = schedule(job.stages // job.stages_per_worker, job.microbatches, job.stages_per_worker)
    if lone:
        lists = tuple(tuple(action for action in line if action.microbatch == 0) for line in lists)
    program = with_transfers(on_owners(lists, ownership), ownership)
    return with_pairs_together(program) if schedule.overlaps else program


def predicted_by_sleeps(program: Program, ownership: Ownership, workers: Sequence[Stamps], overlapping: bool) -> float:
    """Returns how long the dry run of a program takes with the sleeps of one iteration, and nothing else."""
    forward_s, backward_s = mean_sleeps(workers)
    costs = op_costs(forward_s, backward_s, backward_s / 2)
    run = dry_run(program, ownership, lambda action: costs.get(action.op, 0.0), overlapping=overlapping)
    return run.makespan
