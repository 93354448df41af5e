"""`bamboo schema`: prints or writes the JSON schema of scenario or job files, which editors complete and check with."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

EPILOG = (
    "Examples:  bamboo schema > scenario.schema.json  |  bamboo schema job  |  "
    "bamboo schema --output scenario.schema.json"
)


class Files(StrEnum):
    """The files that have a schema."""

    SCENARIO = "scenario"
    JOB = "job"


def schema(
    of: Annotated[Files, typer.Argument(help="which files")] = Files.SCENARIO,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there instead of to stdout.")
    ] = None,
) -> None:
    """Print the JSON schema of scenario or job files."""
    from engine.files.atomic_write import write_atomically
    from engine.files.scenario_schema import job_file_schema, json_schema
    from engine.runtime.faults.registry import kinds

    text = json.dumps(json_schema(kinds()) if of is Files.SCENARIO else job_file_schema(), indent=2)
    if output is None:
        typer.echo(text)
    else:
        write_atomically(output, text + "\n")
