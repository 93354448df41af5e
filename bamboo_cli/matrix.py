"""`bamboo matrix`: runs every cell of a matrix of scenarios, and reports the results in the forms that CI reads."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bamboo_cli.completion import library_files
from bamboo_cli.echo import echo
from bamboo_cli.run_options import EventsMax, TrustCode, events_setting, tell_untrusted
from engine.core.errors import BY_SIGNAL, NothingMatchedError, Problem, UserError, nearest
from engine.core.texts import flags, trust_words

if TYPE_CHECKING:
    from engine.core.checks.cell_result import CellResult
    from engine.files.jobs.matrix_file import Matrix, PlannedCell
    from engine.harness.matrix_runner import MatrixRun


DEFAULT_RESULTS = Path("results")
_cell_option = partial(typer.Option, rich_help_panel="Which cells")

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="a shipped matrix or scenario, or a file", show_default=False, autocompletion=library_files
    ),
]
Shard = Annotated[str, _cell_option("--shard", metavar="K/N", help="Run only part K of N.")]
CellText = Annotated[str, _cell_option("--cell", metavar="TEXT", help="Run only cells whose name contains this.")]
Resume = Annotated[bool, _cell_option("--resume", help="Resume the newest run: skip cells that passed.")]
Times = Annotated[
    list[Path] | None, _cell_option("--times", help="Earlier results.jsonl, to balance the shards by duration.")
]
Form = Annotated[
    Literal["text", "list", "github"],
    typer.Option("--format", help="text: run the cells; list: only print them; github: only print a workflow matrix."),
]
NumShards = Annotated[int, typer.Option("--shards", help="Number of shards for --format github.", min=1)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of every job; repeatable.")
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Cells to run in parallel; 0: one per core.", min=0)]
Limit = Annotated[float, typer.Option("--limit", help="Seconds after which a cell counts as hung.", min=1.0)]
Shrink = Annotated[bool, typer.Option("--shrink", help="Reduce the first failing cell to a smaller one.")]
Budget = Annotated[int, typer.Option("--shrink-tries", help="Maximum number of runs for --shrink.", min=1)]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit XML file.")]
Page = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write the page to this file instead of the matrix folder."),
]
Keep = Annotated[bool, typer.Option("--keep", help="Also keep the run folders of cells that passed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Results = Annotated[Path, typer.Option(help="Folder in which matrices/TIME-NAME-HEX/ is created.")]


EPILOG = (
    "Examples:  bamboo matrix matrix-smoke  |  bamboo matrix mine.yaml --jobs 2 --junit cells.xml  |  "
    "bamboo matrix matrix-full --shard 3/8  |  bamboo matrix matrix-full --resume  |  "
    "bamboo matrix mine.yaml --format github --shards 8  |  bamboo matrix mine.yaml --cell kill/B --shrink"
)

_MOST_RUN_PAGES = 50  # each takes about half a second and a megabyte


def matrix(
    file: File,
    shard: Shard = "",
    cell: CellText = "",
    resume: Resume = False,
    times: Times = None,
    form: Form = "text",
    num_shards: NumShards = 8,
    settings: Settings = None,
    events_max: EventsMax = "",
    jobs: Jobs = 0,
    limit: Limit = 120.0,
    shrink: Shrink = False,
    budget: Budget = 40,
    junit: Junit = None,
    page: Page = None,
    keep: Keep = False,
    as_json: AsJson = False,
    results: Results = DEFAULT_RESULTS,
    trust_code: TrustCode = False,
) -> None:
    """Run every cell of a scenario matrix. Exit with 1 if a cell failed, else with 6 if a cell proved nothing."""
    from engine.files.jobs.matrix_file import read_matrix
    from engine.files.matrix_results import usual_seconds
    from engine.harness.job_checks import offered, readable
    from engine.runtime.faults.registry import kinds

    if shard and form == "github":
        expected = "no part with --format github, which lists every part"
        raise UserError([Problem("--shard", expected, shard, "--shards N")])
    acting = (offered if form == "text" else readable).trusting(trust_code)
    plan = read_matrix(file, kinds(), settings := [*(settings or ()), *events_setting(events_max)], acting)
    seconds = usual_seconds(_existing(times or ()))
    chosen = _chosen(plan, shard, cell, seconds)
    if form != "text":
        tell_untrusted(plan.foreign, acting)
        _print_cells(file, chosen, num_shards if form == "github" else 0, seconds, as_json)
        return
    from engine.core.checks.cell_result import matrix_exit_code
    from engine.harness.matrix_runner import MatrixRun, usual_jobs
    from engine.runtime.process.interrupts import holding

    echo(f"job: {plan.job_from}", err=True)
    with holding() as interrupts:
        run = MatrixRun(_folder(results, plan.name, resume=resume), tuple(settings), limit, keep)
        done, shrunk = _run(plan, chosen, run, jobs or usual_jobs(), seconds, budget if shrink else 0)
        _write(plan, chosen, done, run, junit, page)
        code = int(matrix_exit_code(done)) if interrupts.first is None else 128 + interrupts.first
        _print(plan, chosen, done, run, shrunk, code, as_json)
    raise typer.Exit(code)


def _print_cells(
    file: str, chosen: Sequence[PlannedCell], num_shards: int, seconds: Mapping[str, float], as_json: bool
) -> None:
    """Prints the names of the cells, or with `num_shards` a workflow matrix that runs them."""
    from engine.core.faults.matrix import workflow_matrix

    names = [each.cell.name for each in chosen]
    if num_shards:
        echo(json.dumps(workflow_matrix(file, names, num_shards, seconds)))
    else:
        echo(json.dumps({"cells": names}) if as_json else "\n".join(names))


def _folder(results: Path, name: str, *, resume: bool) -> Path:
    from engine.files.matrix_results import new_folder, newest_folder

    return newest_folder(results, name) if resume else new_folder(results, name, datetime.now(), secrets.token_hex(2))


def _existing(paths: Sequence[Path]) -> Sequence[Path]:
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise UserError(Problem("--times", "an existing file", repr(str(path))) for path in missing)
    return paths


def _chosen(plan: Matrix, shard: str, cell: str, seconds: Mapping[str, float]) -> list[PlannedCell]:
    """Returns the cells with `cell` in their names, or the part of them in `shard`."""
    from engine.core.faults.matrix import parse_part, shards

    names = [each.cell.name for each in plan.cells if cell in each.cell.name]
    if not names:
        hint = nearest(cell, [each.cell.name for each in plan.cells])
        raise NothingMatchedError(f"no cell of {plan.name} has {cell!r} in its name", hint)
    if shard:
        part = parse_part(shard)
        names = shards(names, part.count, seconds)[part.index - 1]
    part_names = set(names)
    return [each for each in plan.cells if each.cell.name in part_names]


def _run(
    plan: Matrix, chosen: Sequence[PlannedCell], run: MatrixRun, jobs: int, seconds: Mapping[str, float], budget: int
) -> tuple[list[CellResult], dict[str, Any] | None]:
    """Returns the results of the chosen cells, also of earlier runs, and of shrinking; a signal leaves out the rest."""
    from engine.core.checks.cell_result import key_of
    from engine.core.faults.matrix import estimated
    from engine.files.matrix_results import read_results
    from engine.harness.matrix_runner import LANE, shrunk_command
    from engine.runtime.process.fork_client import Lanes
    from engine.runtime.process.interrupts import RunInterruptedError

    before = read_results(run.folder)
    keys = {each.cell.name: key_of(each.cell.values, run.settings) for each in chosen}
    done = {name: each for name, each in before.items() if each.result == "passed" and each.key == keys.get(name)}
    left = [each for each in chosen if each.cell.name not in done]
    if done:
        echo(f"{len(done)} cells have passed before, {len(left)} to run", err=True)
    if plan.absent:
        echo(f"{len(plan.absent)} combinations are left out: their action does not exist", err=True)
    expected_s = estimated(
        [each.cell.name for each in left], {**seconds, **{name: each.seconds for name, each in before.items()}}
    )
    shrunk = None

    def tell(number: int, count: int, result: CellResult, left_s: float) -> None:
        done[result.cell] = result
        _tell(number, count, result, left_s)

    with contextlib.suppress(RunInterruptedError), Lanes(LANE, min(jobs, max(1, len(left))), run.folder) as lanes:
        run.run(lanes, left, expected_s, tell)
        first = next((each for each in left if done[each.cell.name].result == "failed"), None)
        if budget and first is not None:
            path, search = run.shrink(
                lanes, first.loaded.scenario, done[first.cell.name], budget, partial(echo, err=True)
            )
            facts = {"tries": search.num_tries, "minimal": search.is_minimal, "command": shrunk_command(path, search)}
            shrunk = {"cell": first.cell.name, "file": str(path)} | facts
    return [done[each.cell.name] for each in chosen if each.cell.name in done], shrunk


def _tell(number: int, count: int, result: CellResult, left_s: float) -> None:
    from bamboo_cli.tables import RESULT_STYLES, say

    lines = [f" {result.seconds:6.2f} s  {result.cell}  ({left_s:.0f} s left)", *result.details]
    say(f"[{number}/{count}] ", (f"{result.result:<7}", RESULT_STYLES[result.result]), "\n    ".join(lines), err=True)


def _write(
    plan: Matrix,
    chosen: Sequence[PlannedCell],
    done: Sequence[CellResult],
    run: MatrixRun,
    junit: Path | None,
    page: Path | None,
) -> None:
    """Writes the page, JUnit if a file is given, and the summary and errors of GitHub in its workflows."""
    from engine.files.atomic_write import open_to_append, storage_errors, write_atomically, write_named
    from engine.report.ci_text import error_commands, junit_xml, step_summary

    missing = _not_run(chosen, done)
    for named in filter(None, (junit, page)):
        with storage_errors("make", named.parent):
            named.parent.mkdir(parents=True, exist_ok=True)
    if junit is not None:
        write_named(junit, junit_xml(plan.name, done, missing))
    place = page or run.folder / "report.html"
    (write_named if page else write_atomically)(place, _page(plan, done, run, place.parent, len(missing)))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(open_to_append(Path(summary)), "a", encoding="utf-8") as stream:
            stream.write(step_summary(plan.name, done))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in error_commands(str(plan.path), done):
            echo(line, err=True)  # the runner reads both streams


def _not_run(chosen: Sequence[PlannedCell], done: Sequence[CellResult]) -> list[str]:
    """Returns the names of the chosen cells without a result: the matrix was interrupted."""
    names = {each.cell for each in done}
    return [each.cell.name for each in chosen if each.cell.name not in names]


def _page(plan: Matrix, done: Sequence[CellResult], run: MatrixRun, folder: Path, num_missing: int) -> str:
    """Returns the page of the matrix, which is to lie in `folder`."""
    from engine.files.host_facts import host_record
    from engine.files.jobs.library import is_shipped
    from engine.files.run_folder import started_at
    from engine.report.pages.matrix_page import MatrixRunFacts, grid_of, matrix_page
    from engine.report.pages.page import host_line, jobs_line, when_text

    host = host_record(started_at(run.folder.name))
    # A page is read on other machines: it has no path of this one.
    near = plan.path.relative_to(Path.cwd()) if plan.path.is_relative_to(Path.cwd()) else Path(plan.path.name)
    replay = partial(_replay, plan, plan.path.stem if is_shipped(plan.path) else str(near), run)
    lines = (jobs_line(each.loaded.scenario.job for each in plan.cells), host_line(host))
    facts = MatrixRunFacts(when_text(host), lines, replay, _run_pages(done, run, folder), num_missing)
    cells = [(each.cell.name, dict(each.cell.labels)) for each in plan.cells]
    return matrix_page(plan.name, grid_of(cells, {each.cell: each for each in done}), done, facts)


def _run_pages(done: Sequence[CellResult], run: MatrixRun, folder: Path) -> dict[str, str]:
    """Writes the pages of the first runs that did not pass; returns their addresses from `folder`, by cell."""
    from bamboo_cli.report import load_run
    from engine.files.atomic_write import write_atomically
    from engine.files.run_folder import RunFolder
    from engine.report.pages.page import page

    written = {}
    runs = [(each.cell, RunFolder(run.folder / "runs" / each.run)) for each in done if each.run]
    for cell, of_run in [each for each in runs if each[1].events.is_file()][:_MOST_RUN_PAGES]:
        path = of_run.path / "report.html"
        write_atomically(path, page(load_run(of_run)))
        written[cell] = os.path.relpath(path, folder)
    return written


def _replay(plan: Matrix, file: str, run: MatrixRun, cell: str) -> str:
    """Returns the command that runs a cell again."""
    from engine.files.jobs.job_layers import masked_setting

    words = ["bamboo", "matrix", file, "--cell", cell, *flags("--set", map(masked_setting, run.settings))]
    return shlex.join([*words, *trust_words(plan.foreign)])


def _print(
    plan: Matrix,
    chosen: Sequence[PlannedCell],
    done: Sequence[CellResult],
    run: MatrixRun,
    shrunk: dict[str, Any] | None,
    code: int,
    as_json: bool,
) -> None:
    from bamboo_cli.tables import LETTER_STYLES, say, width_of
    from engine.core.checks.cell_result import counts_text
    from engine.files.jobs.job_layers import masked_words
    from engine.report.pages.matrix_page import grid_of, grid_parts

    if as_json:
        cells = [asdict(each) for each in done]
        values = {"matrix": plan.name, "exit_code": code, "folder": str(run.folder), "shrunk": shrunk}
        missing = {"interrupted": code in BY_SIGNAL, "not_run": _not_run(chosen, done)}
        echo(json.dumps(values | missing | {"cells": cells}))
        return
    grid = grid_of([(each.cell.name, dict(each.cell.labels)) for each in chosen], {each.cell: each for each in done})
    say(*((text, LETTER_STYLES.get(letter, "")) for text, letter in grid_parts(grid, width_of())))
    for result in done:
        if result.result != "passed":
            echo(f"{result.verdict}: {result.cell}: {result.text}")
            echo(f"  again: {_replay(plan, str(plan.path), run, result.cell)}")
    if shrunk is not None:
        echo(f"shrunk: {shrunk['cell']} in {shrunk['tries']} tries: {shrunk['command']}")
    summary = f"{counts_text(done)}; {sum(each.seconds for each in done):.1f} s of cases"
    if code in BY_SIGNAL:
        summary = f"interrupted after {len(done)} of {len(chosen)} cells: {summary}"
    echo(f"{plan.name}: {summary}")
    echo(str(run.folder))
    if code in BY_SIGNAL:
        again = [*masked_words(sys.argv[1:]), *(["--resume"] if "--resume" not in sys.argv else [])]
        echo(f"go on: {shlex.join(['bamboo', *again])}")
