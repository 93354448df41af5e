"""`bamboo compare A B`: the figures of two runs, and those that got slower."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from bamboo_cli.completion import runs
from bamboo_cli.echo import echo
from bamboo_cli.report import DEFAULT_RESULTS, Results, find, load_run

EPILOG = "Examples:  bamboo compare 20261121-1200 latest  |  bamboo compare old/run new/run --json"


def compare(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="Baseline run: its name, the start of its name, or its folder.", autocompletion=runs
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Run to compare with it.", autocompletion=runs)],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    results: Results = DEFAULT_RESULTS,
) -> None:
    """Compare two runs: quantiles in ms, ratios of the medians (B / A), and the figures that got slower.

    Differing job fields and runs that did not pass are printed first, because the figures may not be comparable.
    """
    from bamboo_cli.tables import BAD, DOUBTFUL, STRONG, print_table, say
    from engine.report.compare import compare as compared
    from engine.report.compare import different_fields, judge_run
    from engine.report.formats import as_text, for_terminal

    loaded = [load_run(find(results, run)) for run in (a, b)]
    table, fields = compared(*loaded), different_fields(*(each.job for each in loaded))
    wrong = {letter: why for letter, each in zip("AB", loaded, strict=True) if (why := judge_run(each)[1])}
    if as_json:
        summary = {"different_fields": fields, "not_passed": wrong, "figures": json.loads(as_text(table, "json"))}
        echo(json.dumps(summary))
        return
    if fields:
        differences = "; ".join(f"{name} {_text(ours)} and {_text(theirs)}" for name, (ours, theirs) in fields.items())
        say((f"The jobs differ: {differences}.", f"{STRONG} {DOUBTFUL}"))
    for letter, why in wrong.items():
        say((f"{letter}: {why}", f"{STRONG} {BAD}"))
    slower = ", ".join(table[table["verdict"] == "slower"]["figure"])
    say((f"B is slower in: {slower}" if slower else "Nothing got slower.", STRONG))
    print_table(*for_terminal(table))


def _text(value: object) -> str:
    return "unset" if value is None or value == "" else str(value)
