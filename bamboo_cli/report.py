"""`bamboo report`: runs as pages, tables or a trace; and conditions on their figures."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo_cli import completion
from bamboo_cli.echo import echo
from engine.core.errors import ExitCode, NothingMatchedError, Problem, StorageError, UserError, required
from engine.core.texts import counted, numbered
from engine.files.atomic_write import write_atomically, write_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.checks.proof import Flaw
    from engine.files.run_folder import RunFolder
    from engine.report.load import RunTables

EPILOG = (
    "Examples:  bamboo report --open  |  bamboo report --table steps --format csv  |  "
    "bamboo report --trace trace.json  |  bamboo report --fail-if 'recovery.stall_ms.p95 > 500'"
)


class Table(StrEnum):
    """The tables of a run."""

    RECOVERY = "recovery"
    STEPS = "steps"
    WORKERS = "workers"
    ACTIONS = "actions"
    CHECKS = "checks"
    OUTCOME = "outcome"
    SAMPLES = "samples"
    EVALUATIONS = "evaluations"
    NORMS = "norms"
    MEMORY = "memory"
    TENSORS = "tensors"
    TIME = "time"
    STAGES = "stages"
    EDGES = "edges"


class Format(StrEnum):
    """The forms of a table."""

    TERMINAL = "terminal"
    CSV = "csv"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"
    PARQUET = "parquet"


_Form = Annotated[
    Format | None,
    typer.Option(
        "--format",
        metavar="|".join(Format),
        help="Output format; every format but `terminal` prints only the table.",
        show_default="terminal",
    ),
]


Results = Annotated[Path, typer.Option(envvar="BAMBOO_RESULTS", help="Folder that holds the runs.")]
DEFAULT_RESULTS = Path("results")
_LONG_BYTES = 8_000_000  # of events: reading more takes longer than a second
# Exit code of a condition -> its word; the first of these codes that occurs is the exit code of all conditions.
_WORST = (ExitCode.OK, ExitCode.NOTHING_MATCHED, ExitCode.EXPECTATION_FAILED)
_SAID = {ExitCode.EXPECTATION_FAILED: "failed", ExitCode.NOTHING_MATCHED: "not judged", ExitCode.OK: "ok"}

_Runs = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Runs: names, starts of names, or folders.", autocompletion=completion.runs),
]


def report(
    runs: _Runs = None,
    *,
    table: Annotated[Table, typer.Option(metavar="|".join(Table), help="Table to print.")] = Table.RECOVERY,
    form: _Form = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table to a file.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page to this file instead of RUN/report.html.")
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a trace for Perfetto.")] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Exit with 1 if CONDITION (TABLE.COLUMN.FIGURE OPERATOR NUMBER) holds, a recovery is unfinished or "
            "the run failed; with 5 if there is nothing to measure. Repeatable.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also read the checkpoints; exit with 1 unless all evidence is complete.")
    ] = False,
    results: Results = DEFAULT_RESULTS,
) -> None:
    """Report on a run: tables, a self-contained page, a trace. The evidence is verified each time."""
    form = _form(form, as_json, output)
    folders = [find(results, run) for run in runs or (None,)]
    if len(folders) > 1 and (page or trace):
        raise UserError([Problem("--page and --trace", "one run", f"{len(folders)} runs")])
    is_whole = table is Table.ACTIONS or trace is not None
    loaded = [load_run(folder, every_action=is_whole, reads_checkpoints=verify) for folder in folders]
    code = max(_verified(loaded, is_strict=verify), _check(loaded, fail_if or ()), key=_WORST.index)
    _say(loaded, form, has_checks=table is Table.CHECKS)
    _write_table(loaded, table, form, output)
    if page is not None or is_opened or form is Format.TERMINAL:
        for folder, run in zip(folders, loaded, strict=True):
            _write_page(folder, run, page, is_opened=is_opened)
    if trace is not None:
        from engine.report.trace import trace as traced

        write_named(trace, json.dumps(traced(loaded[0]), separators=(",", ":")))
    if code:
        raise typer.Exit(code)


def _form(form: Format | None, as_json: bool, output: Path | None) -> Format:
    if as_json and form not in (None, Format.JSON):
        raise UserError([Problem("--json", "no other --format beside it", f"--format {form}")])
    if form is Format.PARQUET and output is None:
        raise UserError([Problem("--format parquet", "--output FILE")])
    return Format.JSON if as_json else form or Format.TERMINAL


def find(results: Path, run: str | None) -> RunFolder:
    """Returns the run with this folder, name or beginning of a name; the latest by default.

    Raises NothingMatchedError if there is no such run, if it has no events yet, or if it is a matrix.
    """
    from engine.files.jobs.library import EXTERNAL_FOLDER
    from engine.files.matrix_results import RESULTS
    from engine.files.run_folder import find_run

    folder = find_run(results, run)
    if folder.path.parent.name == EXTERNAL_FOLDER:
        hint = f"its result is in {folder.run_json}"
        raise UserError([Problem("run", "a run of bamboo's own", "one of another launcher", hint)])
    if (folder.path / RESULTS).is_file():
        told = f"{str(folder.path)!r} is the folder of a matrix: its page is {folder.path / 'report.html'}"
        runs = shlex.quote(str(folder.path / "runs"))
        raise NothingMatchedError(told, f"one of the runs that it kept: bamboo report RUN --results {runs}")
    if not folder.events.is_file():
        raise NothingMatchedError(f"no run to report in {str(folder.path)!r}: there is no {folder.events.name}")
    return folder


def load_run(folder: RunFolder, *, every_action: bool = False, reads_checkpoints: bool = False) -> RunTables:
    """Returns the tables of a run, of a long run with a part of its actions; prints a note before a long read.

    With `reads_checkpoints` a damaged one in the folder of the run is a flaw of its evidence.
    """
    from engine.files.events_file import StepReader, read_history
    from engine.files.evidence import proof_of
    from engine.harness.dead_runs import launcher_runs
    from engine.report.actions import MOST_ACTIONS
    from engine.report.load import load

    num_bytes = folder.events.stat().st_size + StepReader(folder.path).num_bytes
    if num_bytes > _LONG_BYTES:
        echo(f"reading {folder.path.name}: {num_bytes / 1e6:.0f} MB of events", err=True)
    history = read_history(folder.events)
    goes_on = history.training_ended is None and launcher_runs(history, folder.path)
    proof = proof_of(folder, history)
    if reads_checkpoints:
        proof = replace(proof, flaws=(*proof.flaws, *_damaged_checkpoints(folder)))
    tables = load(history, folder.path.name, None if every_action else MOST_ACTIONS, proof)
    return replace(tables, goes_on=goes_on, gaps=(*tables.gaps, *_not_merged(folder)))


def _not_merged(folder: RunFolder) -> list[str]:
    """Returns the words for records that other hosts of the run have shipped; empty for a run on one host."""
    from engine.files.run_folder import kept_copies

    if not (hosts := [each.name for each in kept_copies(folder.path)]):
        return []
    return [f"the actions of {numbered('host', hosts)} are not in it; bamboo collect {folder.path} merges them"]


def _say(runs: Sequence[RunTables], form: Format, *, has_checks: bool) -> None:
    """Prints the outcome of each run, and the checks of a failed one unless they are the table that follows.

    Beside another form than the terminal's, prints only the outcomes of failed runs, to stderr.
    """
    from bamboo_cli.tables import BAD, GOOD, OPEN, STRONG, print_table, say
    from engine.report.formats import for_terminal
    from engine.report.headline import headline
    from engine.report.load import exceptions_in_words

    styles = {"good": GOOD, "bad": BAD, "open": OPEN}
    for run in runs:
        mood, sentence = headline(run)
        if form is Format.TERMINAL or mood == "bad":
            say(f"{run.name}: ", (sentence, f"{STRONG} {styles[mood]}"), err=form is not Format.TERMINAL)
        for gap in run.gaps:
            echo(f"{run.name}: {gap}", err=True)
        told = [*(line for line, _ in exceptions_in_words(run.raised)), *run.remarks] if form is Format.TERMINAL else []
        for line in told:
            echo(f"  {line}")
        if form is Format.TERMINAL and run.judgement.findings and not has_checks:
            print_table(*for_terminal(run.checks))
            echo("")


def _write_table(runs: Sequence[RunTables], table: Table, form: Format, output: Path | None) -> None:
    from bamboo_cli.tables import print_table
    from engine.report.formats import as_parquet, as_text, for_reading, for_terminal
    from engine.report.load import joined

    frame = joined(runs, table)
    if form is Format.PARQUET:
        write_named(required(output, "parquet goes to a file"), as_parquet(frame))
    elif form is Format.TERMINAL and output is None and table is Table.SAMPLES and frame.empty:
        echo("no ledger: the data draws its samples without end", err=True)
    elif form is Format.TERMINAL and output is None:
        shown = for_reading(frame, table)
        print_table(*for_terminal(shown if len(runs) > 1 else shown.drop(columns="run")))
    elif output is None:
        echo(as_text(frame, form), nl=False)
    else:
        write_named(output, as_text(frame, Format.CSV if form is Format.TERMINAL else form))


def _write_page(folder: RunFolder, run: RunTables, named: Path | None, *, is_opened: bool) -> None:
    """Writes the page of a run to the file that the user named, else into the run's folder if it is the user's own."""
    from engine.report.pages.page import page

    path = named or folder.path / "report.html"
    if named is None and not folder.is_own:
        text = f"no page: {str(folder.path)!r} belongs to another user (write it elsewhere: --page FILE)"
        echo(text, err=True)
        return
    (write_named if named else write_atomically)(path, page(run))
    echo(str(path), err=True)
    if is_opened:
        _open(path)


def _open(path: Path) -> None:
    """Opens a page in the user's browser; without one it says so. The command goes on in either case."""
    import webbrowser

    # A browser in the terminal cannot show the page, which is drawn by a script.
    has_browser = any(os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    if not (has_browser and webbrowser.open(path.resolve().as_uri())):
        echo("no browser can be started here; open this file in one (or set BROWSER)", err=True)


def _check(runs: Sequence[RunTables], texts: Sequence[str]) -> ExitCode:
    """Prints each run that has not passed and the outcome of each condition; returns the exit code of all.

    Raises UserError for a malformed condition.
    """
    from engine.report.compare import judge_run, parse_condition
    from engine.report.load import TABLES, joined

    tables = {name: joined(runs, name) for name in TABLES} if texts else {}
    conditions = [parse_condition(text, tables) for text in texts]
    judged = [each.judge(tables) for each in conditions]
    judged = [*filter(itemgetter(1), map(judge_run, runs)), *judged] if texts else []
    for code, text in judged:
        echo(f"{_SAID[code]}: {text}", err=True)
    codes = {ExitCode.OK, *(code for code, _ in judged)}
    return next(code for code in _SAID if code in codes)


def _verified(runs: Sequence[RunTables], *, is_strict: bool) -> ExitCode:
    """Prints each flaw of the evidence of runs, and with `is_strict` what is missing; returns the exit code."""
    told = [f"{run.name}: {each}" for run in runs for each in run.judgement.proof.flaws]
    told += [f"{run.name}: {run.judgement.proof.missing}" for run in runs if is_strict and run.judgement.proof.missing]
    for each in told:
        echo(each, err=True)
    return ExitCode.EXPECTATION_FAILED if told else ExitCode.OK


def _damaged_checkpoints(folder: RunFolder) -> list[Flaw]:
    """Reads the checkpoints in the folder of a run, and returns the flaw of each damaged one.

    The place that a job names for checkpoints is not read: a run may be from elsewhere.
    """
    from engine.core.checks.proof import Flaw
    from engine.files.checkpoint_folder import checkpoints_at

    place, flaws = checkpoints_at(folder.checkpoints.absolute(), folder.path.absolute()), []
    for name in (names := place.names()):
        try:
            place.verify(name)
        except StorageError as error:
            file, _, why = str(error).partition(": ")
            named = (file, why) if file.startswith("step-") else (name, error)
            flaws.append(Flaw(f"checkpoints/{named[0]}", str(named[1])))
    echo(f"{folder.path.name}: {counted(len(names), 'checkpoint')} read, {len(flaws)} damaged", err=True)
    return flaws
