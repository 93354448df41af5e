"""`bamboo collect`: the folders of the hosts of one run, merged into one with the whole history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from bamboo_cli import completion
from bamboo_cli.echo import echo
from bamboo_cli.report import DEFAULT_RESULTS, Results
from engine.core.texts import counted

EPILOG = "Examples:  bamboo collect latest  |  bamboo collect latest /mnt/b/results/20260101-120000-host-b-1a2b --json"


def collect(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The run: its folder name on any host, that folder, or latest.",
            autocompletion=completion.runs,
        ),
    ] = "latest",
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDER",
            help="Folders of the other hosts (default: folders of the same run next to it).",
            show_default=False,
        ),
    ] = None,
    *,
    results: Results = DEFAULT_RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Merge the records of all hosts of a run into RUN/collected, on one clock and in causal order.

    `bamboo report RUN/collected` reads the result. Hosts with incomplete records are named.
    """
    from engine.files.host_folders import collect as collected
    from engine.files.host_folders import folders_of

    summary = collected(folders_of(results, run, folders or []))
    if as_json:
        echo(json.dumps(summary))
        return
    for host in summary["hosts"]:
        echo(_told(host, summary["reference"]))
    echo(f"together {counted(summary['records'], 'record')}, each decision once, in {summary['run_dir']!r}")
    echo(f"next: bamboo report --open {summary['run_dir']}")


def _told(host: dict[str, Any], reference: str) -> str:
    if host["node"] == reference:
        clock = "all times are on its clock"
    else:
        clock = "" if host["within_ms"] is None else f"its times are within {host['within_ms']:.3f} ms"
    parts = [counted(host["records"], "record"), *filter(None, [clock]), *host["incomplete"]]
    return f"host {host['node']}: {'; '.join(parts)}"
