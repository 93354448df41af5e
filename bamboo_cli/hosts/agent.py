"""`bamboo agent`: adds a worker to a running job, and follows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bamboo_cli.options import completion
from bamboo_cli.terminal.echo import echo
from engine.core.errors import Problem, UserError

EPILOG = (
    "Examples:  bamboo agent --join latest  |  bamboo agent --join 20260101-120000-gpt-1a2b --standby  |  "
    "bamboo agent --join latest --json"
)

_Join = Annotated[
    str,
    typer.Option(
        "--join",
        metavar="RUN",
        help="The run, named as its folder is; or its folder; or latest. It was started with --elastic or --standby.",
        autocompletion=completion.runs,
    ),
]


def agent(
    join: _Join = "",
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait for a failure; else the worker joins at a step boundary soon.")
    ] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder of the run folders.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
) -> None:
    """Add a worker to a running job, and follow it; Ctrl-C gives it its notice, and it hands over and leaves."""
    from engine.harness.join_run import Joined, run_to_join
    from engine.runtime.process.interrupts import holding

    if not join:
        raise UserError([Problem("--join", "a run", "none", "such as: bamboo agent --join latest")])
    folder = run_to_join(results, join)
    joined = Joined(folder, is_standby=standby)
    with holding():
        for told in joined.follow():
            echo(json.dumps({"run_dir": str(folder.path), **told}) if as_json else told["text"])
    raise typer.Exit(joined.exit_code)
