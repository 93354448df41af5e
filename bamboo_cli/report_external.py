"""`bamboo report` and `bamboo compare` for runs of other launchers' jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bamboo_cli.echo import echo
from bamboo_cli.report_parts import WORST, Format, Table, is_foreign, judge_conditions, refuse_unreadable, write_frame
from engine.core.errors import ExitCode, Problem, UserError

if TYPE_CHECKING:
    from engine.files.external_runs import ExternalRecord
    from engine.files.run_folder import RunFolder
    from engine.report.external_tables import ExternalTables


def report_external(
    folders: Sequence[RunFolder],
    table: Table,
    form: Format,
    output: Path | None,
    trace: Path | None,
    fail_if: Sequence[str],
    write: Callable[[RunFolder, Callable[[], str]], None],
) -> ExitCode:
    """Reports on runs of other launchers' jobs; returns the exit code. Raises UserError for what they do not have."""
    from bamboo_cli.tables import print_table
    from engine.report.external_tables import joined
    from engine.report.formats import for_terminal
    from engine.report.pages.external_page import external_page

    if trace is not None:
        raise UserError([Problem("--trace", "a run of bamboo's own", "one of another launcher")])
    records, runs = zip(*map(loaded, folders), strict=True)
    if table not in runs[0].tables:
        hint = "a job of another launcher has no others"
        raise UserError([Problem("--table", f"one of {', '.join(runs[0].tables)}", str(table), hint)])
    tables = joined(runs)
    flawed = ExitCode.EXPECTATION_FAILED if any(run.flaws for run in runs) else ExitCode.OK
    code = max(flawed, judge_conditions(tables, [run.code for run in runs], fail_if), key=WORST.index)
    is_read = form is Format.TERMINAL and output is None
    for run in runs:
        _say(run, is_read=is_read, has_checks=table is Table.CHECKS)
    if is_read:
        print_table(*for_terminal(tables[table] if len(runs) > 1 else tables[table].drop(columns="run")))
    else:
        write_frame(tables[table], form, output)
    for folder, record, run in zip(folders, records, runs, strict=True):
        write(folder, partial(external_page, run, record.facts, record.result.get("evidence") or {}))
    return code


def loaded(folder: RunFolder) -> tuple[ExternalRecord, ExternalTables]:
    """Returns the record and the tables of a run; raises UserError for a run of bamboo's own."""
    from engine.files.external_runs import external_record
    from engine.report.external_tables import external_tables

    if not is_foreign(folder):
        raise UserError([Problem("run", "runs of other launchers alone", folder.path.name, "it is bamboo's own")])
    record = external_record(refuse_unreadable(folder))
    flaws = tuple(map(str, record.flaws))
    return record, external_tables(record.name, record.run, record.twin, record.result, flaws)


def _say(run: ExternalTables, *, is_read: bool, has_checks: bool) -> None:
    """Prints the verdict, the flaws of the evidence, and the checks unless they follow; else only what is wrong."""
    from bamboo_cli.tables import print_table
    from engine.report.formats import for_terminal

    verdict = run.tables["outcome"]["verdict"].iloc[0]
    for flaw in run.flaws:
        echo(f"{run.name}: {flaw}", err=True)
    if not is_read:
        if run.code[1]:
            echo(run.code[1], err=True)
        return
    echo(f"{run.name}: {verdict}")
    if not has_checks and verdict != "passed" and len(run.tables["checks"]):
        print_table(*for_terminal(run.tables["checks"].drop(columns="run")))
        echo("")
