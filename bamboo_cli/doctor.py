"""`bamboo doctor`: checks this machine, one line per check with the fix."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

EPILOG = "Examples:  bamboo doctor  |  bamboo doctor --json  |  bamboo doctor --results elsewhere/runs"
_COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "missing": typer.colors.RED}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    results: Annotated[Path, typer.Option(help="Folder that runs would be written to.")] = Path("results"),
) -> None:
    """Check this machine, one line per check with the fix; exit with 4 if something needed is missing."""
    from engine.runtime.doctor.host_checks import check_host, exit_code

    checks = check_host(results)
    code = int(exit_code(checks))
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(check) for check in checks], "exit_code": code}, indent=2))
    else:
        for check in checks:
            status = typer.style(f"{check.status:<7}", fg=_COLOURS[check.status])
            fix = f" -> {check.fix}" if check.fix else ""
            typer.echo(f"{status}  {check.name:<11}  {check.found}{fix}")
    raise typer.Exit(code)
