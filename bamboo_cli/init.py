"""`bamboo init`: writes the first files of a project: a job, a scenario, a matrix, and a workflow for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bamboo_cli.echo import echo

EPILOG = "Examples:  bamboo init  |  bamboo init --ci github  |  bamboo init elsewhere"
_HERE = Path()


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder to write into", show_default=False)] = _HERE,
    ci: Annotated[
        Literal["none", "github"], typer.Option("--ci", help="github: also write a workflow that runs them.")
    ] = "none",
) -> None:
    """Write a starter job, scenario and matrix; with --ci also a workflow. Existing files are kept."""
    from engine.files.jobs.starter import SCENARIO, WORKFLOW, reference, starter, write_new

    files = starter(ci == "github")
    written = write_new(folder, files)
    for path in (folder / name for name in files):
        echo(f"{path}{'' if path in written else ' (kept: it exists)'}")
    if folder / WORKFLOW in written and not reference():
        echo("next: put a wheel of bamboo into wheels/, or set BAMBOO in the workflow to where pip can get it")
    echo(f"next: bamboo inject {folder / SCENARIO}")
