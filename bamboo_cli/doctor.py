"""`bamboo doctor`: checks this machine, one line per check with the fix."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bamboo_cli.echo import echo
from bamboo_cli.tables import BAD, DOUBTFUL, GOOD, print_table

EPILOG = "Examples:  bamboo doctor  |  bamboo doctor --json  |  bamboo doctor --results elsewhere/runs"
_STYLES = {"ok": GOOD, "warn": DOUBTFUL, "missing": BAD}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    results: Annotated[Path, typer.Option(help="Folder for new runs.")] = Path("results"),
) -> None:
    """Check this machine: one line per check, with the fix. Exit with 4 if something required is missing."""
    from engine.harness.host_checks import check_host, exit_code

    checks = check_host(results)
    code = int(exit_code(checks))
    if as_json:
        echo(json.dumps({"checks": [asdict(check) for check in checks], "exit_code": code}, indent=2))
    else:
        rows = [
            (
                Text(check.status, _STYLES[check.status]),
                check.name,
                check.found + (f" -> {check.fix}" if check.fix else ""),
            )
            for check in checks
        ]
        print_table(("status", "check", "found"), (False, False, False), rows, has_head=False)
    raise typer.Exit(code)
