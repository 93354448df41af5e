"""`bamboo schema`: the JSON schema of scenario, matrix or job files, and of scenarios for other jobs, for editors."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from bamboo_cli.echo import echo

EPILOG = (
    "Examples:  bamboo schema > scenario.schema.json  |  bamboo schema job  |  bamboo schema matrix  |  "
    "bamboo schema --output scenario.schema.json"
)


class Files(StrEnum):
    """The files that have a schema."""

    SCENARIO = "scenario"
    MATRIX = "matrix"
    JOB = "job"
    EXTERNAL = "external"


def schema(
    of: Annotated[Files, typer.Argument(metavar="KIND", help="kind of file")] = Files.SCENARIO,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file instead of stdout.")
    ] = None,
) -> None:
    """Print the JSON schema of scenario, matrix or job files."""
    from engine.external.kinds import external_kinds
    from engine.files.atomic_write import write_named
    from engine.files.jobs.forms import external_schema, job_schema, matrix_schema, scenario_schema
    from engine.runtime.faults.registry import kinds

    schemas: dict[Files, Callable[[], dict[str, Any]]] = {
        Files.SCENARIO: lambda: scenario_schema(kinds()),
        Files.MATRIX: matrix_schema,
        Files.JOB: job_schema,
        Files.EXTERNAL: lambda: external_schema(external_kinds(kinds())),
    }
    text = json.dumps(schemas[of](), indent=2)
    if output is None:
        echo(text)
    else:
        write_named(output, text + "\n")
