"""Prints the plan of a job: the grid of actions per worker, and what the dry run predicts. Starts nothing."""

from __future__ import annotations

import json
import shutil

import typer

from engine.core.dry_run import dry_run
from engine.core.grid_text import grid_lines
from engine.core.job import Job
from engine.core.ownership import Ownership
from engine.core.planned import planned
from engine.core.schedules.text import name_of


def print_plan(job: Job, as_json: bool) -> None:
    """Prints the grid with a forward of 1 unit and a backward of 2, the bubble and the peak of stashed activations."""
    program, ownership = planned(job)
    run = dry_run(program, ownership)
    if as_json:
        plan = {
            "schedule": job.schedule,
            "actions": {worker: [str(action) for action in actions] for worker, actions in program.items()},
            "makespan": run.makespan,
            "bubble": run.bubble,
            "peak_stash": run.peak_stash,
            "redundancy": job.redundancy,
            "shadows": {f"{slot[1]}@{slot[0]}": ownership.shadows_of(*slot) for slot in ownership.grid.slots()},
        }
        typer.echo(json.dumps(plan))
        return
    sizes = f"P={job.stages} stages, M={job.microbatches} microbatches, D={job.pipelines} pipelines"
    typer.echo(f"{name_of(job.schedule)}: {sizes}")
    for line in grid_lines(run, shutil.get_terminal_size((120, 24)).columns, ownership):
        typer.echo(line)
    typer.echo(_redundancy_line(job, ownership))
    typer.echo(f"predicted, with backward = 2 x forward: {run.makespan:g} units, bubble {run.bubble:.1%} of the time")
    stash = ", ".join(f"worker {worker}: {peak}" for worker, peak in run.peak_stash.items())
    typer.echo(f"peak stashed activations, in microbatches: {stash}")
    typer.echo("the model itself is not looked at here: a run checks its name, its arguments and its number of layers")


def _redundancy_line(job: Job, ownership: Ownership) -> str:
    """Says who would take over what."""
    if job.redundancy == "reroute":
        return "redundancy reroute: the owner of the same stage in the next pipeline takes over"
    shadows = {slot: ownership.shadows_of(*slot) for slot in ownership.grid.slots()}
    if not any(shadows.values()):
        return f"redundancy {job.redundancy}: nobody shadows a stage"
    named = [f"{stage}{f'@{pipeline}' if pipeline else ''}" for pipeline, stage in shadows]
    who = ", ".join(f"{slot}: {' '.join(map(str, line))}" for slot, line in zip(named, shadows.values(), strict=True))
    note = " (its redundant forwards stand in brackets)" if job.redundancy == "eager" else ""
    return f"redundancy {job.redundancy}, shadows by stage: {who}{note}"
