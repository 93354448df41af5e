"""The schedules that the pipeline benchmark measures, on stages that sleep, and torch's schedule of each."""

from __future__ import annotations

from engine.core.action import Program
from engine.core.config.job import Job
from engine.core.ownership import Ownership
from engine.core.program.build import on_owners
from engine.core.program.transfer_pass import with_transfers
from engine.core.schedules.overlap_pairs import with_pairs_together
from engine.core.schedules.registry import SCHEDULES

TORCH_NAMES = {
    "1f1b": "Schedule1F1B",
    "eager-1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-flexible": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb1p": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
    "dualpipev-overlapped": "ScheduleDualPipeV",
}
# The differences between torch's schedules and ours; the others have the same lists of actions.
REMARKS = {
    "eager-1f1b": ", torch's is 1F1B",
    "zb1p": ", torch's in its own order",
    "dualpipev-overlapped": ", torch's with pairs one after the other",
}
_WIDTH = 256  # of the timed layers and of the data, so that no layer has to widen its input
_WORKERS, _MICROBATCHES, _MOST_STAGES = 4, 8, 2


def timed_job(schedule: str, num_workers: int, microbatches: int, stages_per_worker: int = 1) -> Job:
    """Returns a job of stages that sleep."""
    stages = num_workers * stages_per_worker
    return Job(
        model="timed",
        model_args={"layers": stages, "width": _WIDTH},
        data_args={"features": _WIDTH},
        stages=stages,
        stages_per_worker=stages_per_worker,
        microbatches=microbatches,
        schedule=schedule,
        redundancy="none",
    )


def schedule_job(schedule: str) -> Job:
    """Returns a job of sleeping stages, two per worker if the schedule takes them, else one."""
    return timed_job(schedule, _WORKERS, _MICROBATCHES, _MOST_STAGES if SCHEDULES[schedule].takes(_MOST_STAGES) else 1)


def timed_program(job: Job, ownership: Ownership) -> Program:
    """Returns the program that is timed: forwards, backwards and transfers of a step of a job with a named schedule."""
    schedule = SCHEDULES[job.schedule]
    lists = schedule(job.stages // job.stages_per_worker, job.microbatches, job.stages_per_worker)
    program = with_transfers(on_owners(lists, ownership), ownership)
    return with_pairs_together(program) if schedule.overlaps else program
