"""`bamboo compare A B`: the figures of two runs, and those that got slower."""

from __future__ import annotations

from typing import Annotated

import typer

from bamboo_cli.options.completion import runs
from bamboo_cli.report import DEFAULT_RESULTS, Results, find, load_run

EPILOG = "Examples:  bamboo compare 20261121-1200 latest  |  bamboo compare old/run new/run --json"


def compare(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="The run to measure against: name, beginning, or folder.", autocompletion=runs
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The run that is measured.", autocompletion=runs)],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    results: Results = DEFAULT_RESULTS,
) -> None:
    """Compare two runs: quantiles in ms, ratios of the medians (B / A), and the slower figures."""
    from bamboo_cli.terminal.console import STRONG, say
    from bamboo_cli.terminal.tables import print_table
    from engine.report.compare import compare as compared
    from engine.report.formats import as_text, for_terminal

    table = compared(*(load_run(find(results, run)) for run in (a, b)))
    if as_json:
        typer.echo(as_text(table, "json"), nl=False)
        return
    slower = ", ".join(table[table["verdict"] == "slower"]["figure"])
    say((f"B is slower in: {slower}" if slower else "Nothing got slower.", STRONG))
    print_table(*for_terminal(table))
