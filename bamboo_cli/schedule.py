"""`bamboo schedule`: the program of a job as a grid, verified, or as CSV."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bamboo_cli.job_options import takes_job
from bamboo_cli.plan import print_plan
from engine.core.errors import ExitCode, Problem, ScheduleError, UserError
from engine.files.resolved_job import Resolved

schedule = typer.Typer(
    no_args_is_help=True,
    help="The program of a job: show it, check it, export it, compare schedules.",
    epilog="Examples:  bamboo schedule show --stages 4  |  bamboo schedule check --program mine.csv  |  "
    "bamboo schedule export --schedule gpipe > gpipe.csv  |  "
    "bamboo schedule compare --schedule zbv --stages 8 --stages-per-worker 2",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@schedule.command()
@takes_job
def show(resolved: Resolved, *, as_json: AsJson = False) -> None:
    """Show the program of a job as a grid, with the predicted bubble and peak of stashed activations."""
    print_plan(resolved.job, as_json)


@schedule.command()
@takes_job
def check(
    resolved: Resolved,
    *,
    program_file: Annotated[
        Path | None, typer.Option("--program", help="A whole program as CSV, instead of the job's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a program: complete, ordered, free of deadlock. Exit with 1 and the broken rules when it is not."""
    from engine.core.planned import planned
    from engine.core.program import from_csv
    from engine.core.verify import verify

    program, ownership = planned(resolved.job)
    if program_file is not None:
        program = from_csv(_read(program_file))
        if sorted(program) != list(ownership.workers()):
            raise ScheduleError(f"{program_file}: expected {len(ownership.workers())} rows, found {len(program)}")
    violations = verify(program, ownership)
    if as_json:
        code = ExitCode.EXPECTATION_FAILED if violations else ExitCode.OK
        typer.echo(json.dumps({"violations": [str(each) for each in violations], "exit_code": int(code)}))
    else:
        for each in violations:
            typer.echo(str(each))
        num_actions = sum(len(actions) for actions in program.values())
        found = f"{len(violations)} broken rules" if violations else "verified"
        typer.echo(f"{found}: {num_actions} actions on {len(program)} workers")
    if violations:
        raise typer.Exit(ExitCode.EXPECTATION_FAILED)


@schedule.command()
@takes_job
def export(
    resolved: Resolved,
    *,
    compute_only: Annotated[bool, typer.Option("--compute-only", help="Forwards and backwards alone.")] = False,
) -> None:
    """Print the program as CSV, one row per worker; compute actions are spelled as torch's pipelining does."""
    from engine.core.action import COMPUTE_OPS
    from engine.core.planned import planned
    from engine.core.program import to_csv

    program, _ = planned(resolved.job)
    if compute_only:
        program = {
            worker: tuple(action for action in actions if action.op in COMPUTE_OPS)
            for worker, actions in program.items()
        }
    typer.echo(to_csv(program), nl=False)


@schedule.command()
@takes_job
def compare(resolved: Resolved, *, as_json: AsJson = False) -> None:
    """Compare every schedule on the workers of a job: length over ideal, bubble, peak stash, transfers."""
    from engine.core.schedule_table import compare as rows_of

    job = resolved.job
    rows = list(rows_of(job.stages, job.microbatches, job.stages_per_worker))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    typer.echo(
        f"{job.stages // job.stages_per_worker} workers, {job.stages} stages, {job.microbatches} microbatches; "
        "backward = 2 x forward, in equal parts"
    )
    typer.echo(
        f"{'schedule':<22}{'V':>3}{'placement':>11}{'length':>9}{'over ideal':>12}{'bubble':>8}{'stash':>7}{'sends':>8}"
    )
    for row in rows:
        typer.echo(
            f"{row.schedule:<22}{row.stages_per_worker:>3}{row.placement:>11}{row.makespan:>9g}"
            f"{row.over_ideal:>12.3f}{row.bubble:>8.1%}{row.peak_stash:>7}{row.transfers:>8}"
        )
    typer.echo("stash: residuals of stages, each a part 1/V of a worker's layers")


def _read(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise UserError([Problem("--program", "a CSV file", str(path))])
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or "" if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError([Problem("--program", "a readable CSV file", str(path), reason)]) from error
