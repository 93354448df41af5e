"""`bamboo schedule`: the program of a job as a grid, verified, or as CSV."""

from __future__ import annotations

import gc
import json
import math
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo_cli import completion
from bamboo_cli.echo import echo
from bamboo_cli.job_options import takes_job
from bamboo_cli.plan import print_plan
from engine.core.errors import ExitCode, Problem, ScheduleError, UserError
from engine.files.jobs.resolved_job import ResolvedJob

if TYPE_CHECKING:
    from engine.core.job.job import Job
    from engine.core.job.schedule_comparison import ScheduleComparison
    from engine.core.program.schedule_search import Profile, SearchResult

schedule = typer.Typer(
    no_args_is_help=True,
    help="Show, check or export a job's program; compare or search schedules; switch that of a live run.",
    epilog="Examples:  bamboo schedule show --stages 4  |  bamboo schedule check --program mine.csv  |  "
    "bamboo schedule export --schedule gpipe > gpipe.csv  |  "
    "bamboo schedule compare --stages 8 --stages-per-worker 2  |  "
    "bamboo schedule search --profile latest --memory 3 --output mine.csv",
)

# This schedule accepts every number of stages per worker; the job's own may not.
_OF_ANY_SIZE = {"schedule": "interleaved", "placement": "auto", "blocks": "1"}
_SLOW = 8000  # stages times microbatches: larger comparisons take longer than a second
_takes_job = partial(takes_job, program_only=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Memory = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        help="Memory limit: how many microbatches' activations a worker may hold at once, counted over all its layers.",
        show_default="as many as the hungriest schedule",
    ),
]
_ProfileRun = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Take all costs from the actions of this run.", autocompletion=completion.runs),
]
Forward = Annotated[float, typer.Option(help="Cost of one forward of a stage.")]
Backward = Annotated[float, typer.Option(help="Cost of one whole backward.")]
Weights = Annotated[
    float | None, typer.Option(help="Cost of the weight part of a backward.", show_default="half of it")
]
Transfer = Annotated[float, typer.Option(help="Time of a transfer; the sender does not wait for it.")]


@schedule.command()
@_takes_job
def show(resolved: ResolvedJob, *, as_json: AsJson = False) -> None:
    """Show the program of a job as a grid, with the predicted bubble and peak activation stash."""
    print_plan(resolved.job, as_json)


@schedule.command()
@_takes_job
def check(
    resolved: ResolvedJob,
    *,
    program_file: Annotated[
        Path | None, typer.Option("--program", help="Check this complete program (CSV) instead of the job's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify that a program is complete, ordered and free of deadlock. If not, print the broken rules and exit with 1.

    An invalid `--schedule FILE.csv` is a mistake in the job: exit with 2.
    """
    from engine.core.job.partition import initial_program
    from engine.core.program.build import from_csv
    from engine.core.program.dry_run import marked_lines
    from engine.core.program.verify import verify

    gc.disable()  # a program is a million tuples, none of them garbage
    program, ownership = initial_program(resolved.job)
    if program_file is not None:
        program = from_csv(_read(program_file))
        if sorted(program) != list(ownership.workers()):
            raise ScheduleError(f"{program_file}: expected {len(ownership.workers())} rows, found {len(program)}")
    violations = verify(program, ownership)
    if as_json:
        code = ExitCode.EXPECTATION_FAILED if violations else ExitCode.OK
        echo(json.dumps({"violations": [str(each) for each in violations], "exit_code": int(code)}))
    else:
        for each in violations:
            echo(str(each))
        marked = {(each.worker, each.position) for each in violations if each.position >= 0}
        for line in marked_lines(program, marked, shutil.get_terminal_size((120, 24)).columns) if marked else ():
            echo(line)
        num_actions = sum(len(actions) for actions in program.values())
        verdict = f"{len(violations)} broken rules" if violations else "verified"
        echo(f"{verdict}: {num_actions} actions on {len(program)} workers")
    if violations:
        raise typer.Exit(ExitCode.EXPECTATION_FAILED)


@schedule.command()
@_takes_job
def export(
    resolved: ResolvedJob,
    *,
    compute_only: Annotated[
        bool,
        typer.Option(
            "--compute-only", help="Only forwards and backwards, which is all that torch and --schedule read."
        ),
    ] = False,
) -> None:
    """Print the program as CSV, one row per worker, with compute actions in the syntax of torch's pipelining.

    `schedule check --program` reads a complete program. Torch's `_load_csv` and `--schedule FILE.csv` read only the
    compute actions of one pipeline: use `--compute-only`.
    """
    from engine.core.action import COMPUTE_OPS
    from engine.core.job.partition import initial_program
    from engine.core.program.build import pairs_in, to_csv

    job = replace(resolved.job, redundancy="none") if compute_only else resolved.job
    program, _ = initial_program(job)
    if not compute_only or job.pipelines > 1:
        echo("torch's pipelining and --schedule FILE.csv read --compute-only, of one pipeline", err=True)
    if compute_only:
        program = {
            worker: tuple(action for action in actions if action.op in COMPUTE_OPS)
            for worker, actions in program.items()
        }
    echo(to_csv(program, pairs_in(job.schedule) if compute_only else None), nl=False)


@schedule.command()
@partial(_takes_job, instead=_OF_ANY_SIZE)
def compare(
    resolved: ResolvedJob,
    *,
    forward: Forward = 1,
    backward: Backward = 2,
    weights: Weights = None,
    transfer: Transfer = 0,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Count the two actions of an overlapped pair as simultaneous.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare every schedule on the workers of a job: step length / ideal length, bubble, peak stash, transfers.

    With `--transfer`, the table shows how well a schedule hides transfers.
    With `--redundancy eager`, it also shows the time that redundant forwards add to a step.
    """
    from bamboo_cli.tables import say
    from engine.core.job.schedule_comparison import compare as comparison_of
    from engine.core.program.schedules import op_costs

    job = resolved.job
    weights = backward / 2 if weights is None else weights
    _check_costs(forward, backward, weights, transfer)
    costs = op_costs(forward, backward, weights)
    comparison = comparison_of(
        job.stages,
        job.microbatches,
        job.stages_per_worker,
        lambda action: costs.get(action.op, 0.0),
        job.redundancy,
        job.redundancy_level,
        begin=(lambda name: echo(f"comparing {name}", err=True))
        if job.stages * job.program_microbatches > _SLOW
        else str,
        latency=transfer,
        overlapping=overlap,
        slices=job.slices,
    )
    if as_json:
        echo(json.dumps(asdict(comparison)))
        return
    say(
        f"{job.stages // job.stages_per_worker} workers, {job.stages} stages, {job.microbatches} microbatches"
        + f" of {job.slices} slices" * (job.slices > 1)
        + f"; forward {forward:g}, backward {backward:g}, of which {weights:g} for the weights"
        + (f"; a transfer takes {transfer:g}" if transfer else "")
    )
    _print_comparison(comparison, job.redundancy == "eager", job.slices)


@schedule.command()
@partial(_takes_job, instead=_OF_ANY_SIZE)
def search(
    resolved: ResolvedJob,
    *,
    memory: _Memory = None,
    profile: _ProfileRun = None,
    forward: Forward = 1,
    backward: Backward = 2,
    weights: Weights = None,
    transfer: Transfer = 0,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the schedule to FILE.csv.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the shortest schedule within a memory limit, with costs that you give or that a run has measured.

    Compares it with every built-in schedule that fits the job. To train with it, pass `--schedule FILE.csv`.
    """
    from engine.core.program.schedule_csv import rows_to_csv
    from engine.core.program.schedule_search import even_profile, searched
    from engine.files.atomic_write import write_named

    job = resolved.job
    if memory is not None and not 1 <= memory < math.inf:
        raise UserError([Problem("--memory", "a number >= 1: a microbatch on its way takes that much", f"{memory:g}")])
    if profile is None:
        weights = backward / 2 if weights is None else weights
        _check_costs(forward, backward, weights, transfer)
        costs = even_profile(job.stages, forward, backward - weights, weights, transfer).times(1 / job.slices)
    else:
        costs = _measured(job, profile)
    if job.stages * job.program_microbatches > _SLOW // 32:
        echo("searching, up to ten seconds", err=True)
    result = searched(job.stages, job.stages_per_worker, job.microbatches, costs, memory, slices=job.slices)
    if output is not None:
        write_named(output, rows_to_csv(result.lists))
    if as_json:
        echo(json.dumps({"rows": [asdict(row) for row in result.rows], "least": result.least}))
        return
    _print_search(job, result, " ms" if profile else "", costs.copy_time)
    if output is not None:
        names = ("stages", "stages_per_worker", "microbatches", *["slices"][: job.slices - 1])
        shape = {name: getattr(job, name) for name in names}
        flags = " ".join(f"--{name.replace('_', '-')} {number}" for name, number in shape.items())
        echo(f"next: bamboo run --schedule {output} {flags}")


def _print_search(job: Job, result: SearchResult, unit: str, copy_time: float | None) -> None:
    from bamboo_cli.tables import print_table, say

    say(
        f"{job.stages // job.stages_per_worker} workers, {job.stages} stages, {job.microbatches} microbatches; "
        f"no schedule takes less than {result.least:.4g}{unit}"
    )
    rows = [
        (
            *(row.schedule, row.placement, f"{row.length:.4g}{unit}", f"{row.length / result.least:.3f}"),
            f"{row.stash:g}",
            *(() if row.offloaded is None else (f"{row.offloaded:g}",)),
            "" if row.fits else "over the limit",
        )
        for row in result.rows
    ]
    offloaded = () if copy_time is None else ("offloaded",)
    titles = ("schedule", "placement", "length", "over least", "stash", *offloaded, "")
    print_table(titles, tuple(title not in ("schedule", "placement", "") for title in titles), rows)
    say("stash: microbatches of all layers of a worker")
    if copy_time is not None:
        say(f"offloaded: what stays with --offload host --offload-time {copy_time:.2g}, as the run has measured")


def _measured(job: Job, run: str) -> Profile:
    """Returns what the actions of a run took, which may have had another number of slices."""
    from bamboo_cli.report import find, load_run
    from engine.report.profile import profile_of

    tables = load_run(find(Path(job.results), run), every_action=True)
    if tables.job.stages != job.stages:
        stages, hint = f"{tables.job.stages} in {run}", f"for its own job, begin with {run}/run.json"
        raise UserError([Problem("--profile", f"a run with {job.stages} stages", stages, hint)])
    profile = profile_of(tables.actions, job.stages, tables.facts.copy_time)
    return profile.times(tables.job.slices / job.slices)


def _check_costs(forward: float, backward: float, weights: float, transfer: float) -> None:
    """Raises UserError with every impossible cost."""
    problems = [
        Problem(name, "a finite number > 0", f"{cost:g}")
        for name, cost in (("--forward", forward), ("--backward", backward))
        if not 0 < cost < math.inf
    ]
    if not 0 <= transfer < math.inf:
        problems.append(Problem("--transfer", "a finite number >= 0", f"{transfer:g}"))
    if not problems and not 0 <= weights <= backward:
        problems.append(Problem("--weights", f"a number from 0 to the whole backward's {backward:g}", f"{weights:g}"))
    if problems:
        raise UserError(problems)


def _print_comparison(comparison: ScheduleComparison, is_eager: bool, slices: int) -> None:
    from bamboo_cli.tables import print_table, say

    titles = ["schedule", "V", "placement", "length", "over ideal", "bubble", "stash", "sends", "over none"]
    rows = [
        (
            *(row.schedule, str(row.stages_per_worker), row.placement, f"{row.makespan:g}", f"{row.over_ideal:.3f}"),
            *(f"{row.bubble:.1%}", str(row.peak_stash), str(row.transfers), f"{row.over_none:.1%}"),
        )
        for row in comparison.rows
    ]
    shown = len(titles) if is_eager else len(titles) - 1
    numeric = [title not in ("schedule", "placement") for title in titles]
    print_table(titles[:shown], numeric[:shown], [row[:shown] for row in rows])
    skipped = [(name, f"not compared: {reason}") for name, reason in comparison.skipped.items()]
    print_table(("schedule", "reason"), (False, False), skipped, has_head=False)
    of_slice = f" and 1/{slices} of a microbatch" * (slices > 1)
    say(f"stash: residuals of stages, each a part 1/V of a worker's layers{of_slice}")
    if is_eager:
        say("over none: time that redundant forwards add to a step; they count in bubble and stash")


def _read(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise UserError([Problem("--program", "a CSV file", str(path))])
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or "" if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError([Problem("--program", "a readable CSV file", str(path), reason)]) from error


@schedule.command()
def use(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A schedule that fits the run; own: back to the job's own schedule.")
    ],
    run: Annotated[
        str, typer.Option("--run", metavar="RUN", help="Name of a live run.", autocompletion=completion.runs)
    ] = "latest",
    results: Annotated[Path, typer.Option("--results", help="Folder that holds the runs.")] = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Switch a live run to another schedule at the next step boundary; its bits stay the same."""
    from engine.harness.live_run import use_schedule

    folder, epoch, step = use_schedule(results, run, name)
    if as_json:
        echo(json.dumps({"run": folder.path.name, "schedule": name, "step": step, "epoch": epoch.epoch}))
    else:
        echo(f"{folder.path.name}: {epoch.reason}")
