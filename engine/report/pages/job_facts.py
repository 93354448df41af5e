"""The lines at the top of a page that say which job ran, on which machine, and when."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from engine.core.config.job import Job
from engine.core.history.process_records import HostRecord
from engine.core.schedules.csv_text import name_of
from engine.core.texts import counted


def job_line(job: Job) -> str:
    """Returns the job in one line: model, data, shape, schedule and redundancy."""
    pipelines = f"{counted(job.pipelines, 'pipeline')} of " if job.pipelines > 1 else ""
    per_worker = f", {job.stages_per_worker} per worker" if job.stages_per_worker > 1 else ""
    parts = [
        f"model {job.model} on data {job.data}",
        f"{pipelines}{job.cut}{per_worker}",
        f"schedule {name_of(job.schedule)}",
        f"{counted(job.microbatches, 'microbatch', 'microbatches')} of {job.microbatch_size}",
        f"redundancy {job.redundancy}",
        counted(job.steps, "step"),
        f"seed {job.seed}",
    ]
    return "Job: " + ", ".join(parts) + "."


def jobs_line(jobs: Iterable[Job]) -> str:
    """Returns the first of some jobs in one line, and the number of others."""
    lines = list(dict.fromkeys(map(job_line, jobs)))
    others = [f"{counted(len(lines) - 1, 'other job')} in other cells."] if len(lines) > 1 else []
    return " ".join([*lines[:1], *others])


def host_line(host: HostRecord) -> str:
    """Returns the machine in one line: processor, cores and versions."""
    torch = f", torch {host.torch}" if host.torch else ""
    return f"Machine: {host.cpu}, {counted(host.cores, 'core')}{torch}, Python {host.python}."


def when_text(host: HostRecord) -> str:
    """Returns the day and the local time at which a run began, such as ``22 November 2026, 14:40``."""
    began = datetime.fromisoformat(host.began)
    return f"{began.day} {began:%B %Y, %H:%M}"
