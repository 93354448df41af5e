"""The option ``--trust-code``, and the note about values of a file that need it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo_cli.terminal.echo import echo
from engine.core.errors import Problem

if TYPE_CHECKING:
    from engine.core.job.job_rules import JobParts

TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        envvar="BAMBOO_TRUST_CODE",
        help="Trust code (package.module:attribute) and output folders named by a scenario, a matrix, a job file that "
        "they name, a checkpoint, or the bamboo.yaml in this folder.",
    ),
]


def tell_untrusted(foreign: Iterable[Problem], offered: JobParts) -> None:
    """Prints one line to stderr for each value that a run would refuse, unless the user trusts files."""
    for each in () if offered.trusts_files else foreign:
        echo(f"a run needs --trust-code: {each}", err=True)
