"""`bamboo init`: writes the first files of a project: a job, a scenario, and a workflow that runs matrices in CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

EPILOG = "Examples:  bamboo init  |  bamboo init --ci github  |  bamboo init elsewhere"
_HERE = Path()


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder for the files", show_default=False)] = _HERE,
    ci: Annotated[
        Literal["none", "github"], typer.Option("--ci", help="github: also the workflow that runs the matrices.")
    ] = "none",
) -> None:
    """Write a job and a first scenario; with --ci also a workflow. Existing files are kept."""
    from engine.files.scenarios.starter import SCENARIO, starter, write_new

    for path in write_new(folder, starter(ci == "github")):
        typer.echo(str(path))
    typer.echo(f"next: bamboo inject --scenario {folder / SCENARIO}")
