"""The options of `bamboo run` about a checkpoint to begin after; its job is the lowest layer of the run's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo_cli.terminal.echo import echo
from engine.core.errors import BambooError, Problem, UserError

if TYPE_CHECKING:
    from engine.files.jobs.checkpoint_choice import Found
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
    from engine.files.jobs.checkpoint_choice import refuse_other_bits

    if not text:  # as of a variable that is not set
        raise UserError([Problem("--resume", "latest, a run, or a folder or URL of checkpoints", "''")])
    folder = Path(results or os.environ.get("BAMBOO_RESULTS") or _RESULTS)
    found = _found(text, folder)
    resolved = resolve(kept=found.document)
    refuse_other_bits(found, resolved.job, other_bits)
    echo(found.words, err=True)
    return replace(resolved, origin=replace(found.origin, other_bits=other_bits or found.origin.other_bits))


def _found(text: str, folder: Path) -> Found:
    """Returns the checkpoint that `text` names; another process reads, as a disk may have stopped."""
    from engine.files.jobs.checkpoint_choice import Found, find_checkpoint
    from engine.runtime.keeping.away import READ_LIMIT_S, answered, heard, told

    def read() -> list[Any]:
        said: list[str] = []
        try:
            return [said, find_checkpoint(text, folder, said.append).to_plain(), None]
        except BambooError as error:
            return [said, None, told(error)]

    place = text if os.sep in text else str(folder)
    answered(place, lambda: Path(place.partition("@")[0]).exists() and None)  # soon, on a disk that has not stopped
    said, found, error = answered(place, read, READ_LIMIT_S)
    for each in said:
        echo(each, err=True)
    if error is not None:
        raise heard(error)
    return Found.of_plain(found)
