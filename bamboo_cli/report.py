"""`bamboo report`: runs as pages, tables or a trace; and conditions on their figures."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo_cli import completion
from bamboo_cli.echo import echo
from bamboo_cli.report_parts import (
    WORST,
    Format,
    Table,
    is_foreign,
    judge_conditions,
    located,
    refuse_unreadable,
    write_frame,
    write_page,
)
from engine.core.errors import ExitCode, Problem, StorageError, UserError
from engine.core.texts import counted, numbered
from engine.files.atomic_write import write_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.core.checks.proof import Flaw
    from engine.files.run_folder import RunFolder
    from engine.report.load import RunTables

EPILOG = (
    "Examples:  bamboo report --open  |  bamboo report --table steps --format csv  |  "
    "bamboo report --trace trace.json  |  bamboo report --fail-if 'recovery.stall_ms.p95 > 500'"
)


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
    """Report on a run: tables, a self-contained page, a trace. Every report verifies the evidence."""
    form = _form(form, as_json, output)
    folders = [located(results, run) for run in runs or (None,)]
    if len(folders) > 1 and (page or trace):
        raise UserError([Problem("--page and --trace", "one run", f"{len(folders)} runs")])
    has_page = page is not None or is_opened or form is Format.TERMINAL
    write = partial(write_page, named=page, is_opened=is_opened) if has_page else _no_page
    if any(map(is_foreign, folders)):
        from bamboo_cli.report_external import report_external

        raise typer.Exit(report_external(folders, table, form, output, trace, fail_if or (), write))
    is_whole = table is Table.ACTIONS or trace is not None
    loaded = [load_run(refuse_unreadable(of), every_action=is_whole, reads_checkpoints=verify) for of in folders]
    code = max(_verified(loaded, is_strict=verify), _check(loaded, fail_if or ()), key=WORST.index)
    _say(loaded, form, has_checks=table is Table.CHECKS)
    _write_table(loaded, table, form, output)
    for folder, run in zip(folders, loaded, strict=True):
        write(folder, partial(_page_of, run))
    if trace is not None:
        from engine.report.trace import trace as traced

        write_named(trace, json.dumps(traced(loaded[0]), separators=(",", ":")))
    if code:
        raise typer.Exit(code)


def _no_page(folder: RunFolder, page: Callable[[], str]) -> None:
    """Writes none, beside a table for programs."""


def _form(form: Format | None, as_json: bool, output: Path | None) -> Format:
    if as_json and form not in (None, Format.JSON):
        raise UserError([Problem("--json", "no other --format with it", f"--format {form}")])
    if form is Format.PARQUET and output is None:
        raise UserError([Problem("--format parquet", "--output FILE")])
    return Format.JSON if as_json else form or Format.TERMINAL


def find(results: Path, run: str | None) -> RunFolder:
    """Returns the run of a folder, a name or its beginning, by default the latest; raises NothingMatchedError."""
    folder = located(results, run)
    if is_foreign(folder):
        hint = f"bamboo report {folder.path} shows it"
        raise UserError([Problem("run", "a run of bamboo's own", "one of another launcher", hint)])
    return refuse_unreadable(folder)


def load_run(folder: RunFolder, *, every_action: bool = False, reads_checkpoints: bool = False) -> RunTables:
    """Returns the tables of a run, also of a long one; with `reads_checkpoints` a damaged one is a flaw."""
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
    """Prints the outcome of each run, and a failed one's checks; with another form only failures, to stderr."""
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
        more = [*(line for line, _ in exceptions_in_words(run.raised)), *run.remarks] if form is Format.TERMINAL else []
        for line in more:
            echo(f"  {line}")
        if form is Format.TERMINAL and run.judgement.findings and not has_checks:
            print_table(*for_terminal(run.checks))
            echo("")


def _write_table(runs: Sequence[RunTables], table: Table, form: Format, output: Path | None) -> None:
    from bamboo_cli.tables import print_table
    from engine.report.formats import for_reading, for_terminal
    from engine.report.load import joined

    frame = joined(runs, table)
    if form is not Format.TERMINAL or output is not None:
        write_frame(frame, form, output)
    elif table is Table.SAMPLES and frame.empty:
        echo("no ledger: the data source never ends", err=True)
    else:
        shown = for_reading(frame, table)
        print_table(*for_terminal(shown if len(runs) > 1 else shown.drop(columns="run")))


def _page_of(run: RunTables) -> str:
    from engine.report.pages.page import page

    return page(run)


def _check(runs: Sequence[RunTables], texts: Sequence[str]) -> ExitCode:
    """Prints each run that has not passed, and each condition; returns the exit code of all. Raises UserError."""
    from engine.report.compare import judge_run
    from engine.report.load import TABLES, joined

    return judge_conditions({name: joined(runs, name) for name in TABLES} if texts else {}, map(judge_run, runs), texts)


def _verified(runs: Sequence[RunTables], *, is_strict: bool) -> ExitCode:
    """Prints each flaw of the evidence of runs, and with `is_strict` what is missing; returns the exit code."""
    flaws = [f"{run.name}: {each}" for run in runs for each in run.judgement.proof.flaws]
    flaws += [f"{run.name}: {run.judgement.proof.missing}" for run in runs if is_strict and run.judgement.proof.missing]
    for each in flaws:
        echo(each, err=True)
    return ExitCode.EXPECTATION_FAILED if flaws else ExitCode.OK


def _damaged_checkpoints(folder: RunFolder) -> list[Flaw]:
    """Reads the checkpoints in a run's own folder, and returns the flaw of each damaged one."""
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
