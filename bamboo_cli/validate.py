"""`bamboo validate`: reads scenario files and says what is wrong with them, without running anything."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from engine.core.errors import BambooError, ExitCode, UserError

EPILOG = (
    "Examples:  bamboo validate kill-middle-stage  |  bamboo validate mine.yaml yours.yaml  |  "
    "bamboo validate --json mine.yaml"
)


def validate(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="scenario files, or names from the library", show_default=False),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of what is random (default: the job's seed).", min=0)
    ] = None,
) -> None:
    """Check scenarios: fields, moments that can come, victims that there are. Exit with 2 when any is no good."""
    found = [_checked(each, seed, as_json) for each in files]
    good = all(each["valid"] for each in found)
    code = ExitCode.OK if good else ExitCode.USAGE
    if as_json:
        typer.echo(json.dumps({"exit_code": int(code), "files": found}))
    raise typer.Exit(code)


def _checked(name: str, seed: int | None, as_json: bool) -> dict[str, Any]:
    from engine.files.scenario_file import load_scenario
    from engine.runtime.faults.registry import kinds

    try:
        loaded = load_scenario(name, kinds(), seed)
    except BambooError as error:
        problems = [asdict(each) for each in error.problems] if isinstance(error, UserError) else []
        if not as_json:
            for line in str(error).splitlines():
                typer.echo(f"bamboo: {line}", err=True)
        return {"file": name, "valid": False, "problems": problems, "error": str(error)}
    if not as_json:
        number = "1 fault" if len(loaded.faults) == 1 else f"{len(loaded.faults)} faults"
        typer.echo(f"{name}: valid: {number}, expects {loaded.scenario.expect.outcome}")
    return {"file": name, "valid": True, "problems": [], "faults": [str(each) for each in loaded.faults]}
