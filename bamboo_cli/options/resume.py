"""The options of `bamboo run` about a checkpoint to begin after; its job is the lowest layer of the run's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo_cli.terminal.echo import echo
from engine.core.errors import Problem, UserError

if TYPE_CHECKING:
    from engine.files.jobs.resolved_job import Resolved

_PANEL = "Checkpoints"
_RESULTS = "results"

Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="latest|RUN|DIR[@STEP]",
        help="Go on from the newest good checkpoint of a run, of the newest run that has one (latest), or of a folder "
        "or URL of checkpoints, with its job. Stages, schedule, redundancy, workers and so on may be others.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
OtherBits = Annotated[
    bool,
    typer.Option(
        "--other-bits",
        help="With --resume: go on although a field, this machine, a data file or your code gives other bits.",
        rich_help_panel=_PANEL,
    ),
]


def resolve_resumed(text: str, other_bits: bool, results: Any, resolve: Callable[..., Resolved]) -> Resolved:
    """Returns the job that goes on from the checkpoint that `text` names, and says which; `resolve` takes its job.

    Raises:
        BambooError: the text is empty, there is no good checkpoint, or the job would give other bits.
    """
    from engine.files.jobs.checkpoint_choice import find_checkpoint, refuse_other_bits

    if not text:  # as of a variable that is not set
        raise UserError([Problem("--resume", "latest, a run, or a folder or URL of checkpoints", "''")])
    folder = Path(results or os.environ.get("BAMBOO_RESULTS") or _RESULTS)
    found = find_checkpoint(text, folder, lambda line: echo(line, err=True))
    resolved = resolve(kept=found.document)
    refuse_other_bits(found, resolved.job, other_bits)
    echo(found.words, err=True)
    return replace(resolved, origin=replace(found.origin, other_bits=other_bits or found.origin.other_bits))
