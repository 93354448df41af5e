"""`bamboo checkpoint`: the checkpoints of a run, in a folder or at a URL: listed, verified, deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo_cli import completion
from bamboo_cli.echo import echo
from bamboo_cli.report import DEFAULT_RESULTS, Results
from engine.core.errors import ExitCode, NothingMatchedError, StorageError
from engine.core.texts import counted
from engine.core.units import finite

if TYPE_CHECKING:
    from engine.files.checkpoint_folder import CheckpointName
    from engine.files.jobs.checkpoint_place import CheckpointPlace


checkpoint = typer.Typer(
    no_args_is_help=True,
    help="List the checkpoints of a run, verify every byte, delete old ones.",
    epilog="Examples:  bamboo checkpoint list  |  bamboo checkpoint verify latest@479  |  "
    "bamboo checkpoint verify s3://bucket/folder --json  |  bamboo checkpoint prune 20261123-1200 --keep 1",
)

Where = Annotated[
    str,
    typer.Argument(
        metavar="RUN|DIR|URL[@STEP]",
        help="A run (its name, the start of its name, or latest), or a folder or URL of checkpoints; @STEP or "
        "DIR/step-N selects one step.",
        autocompletion=completion.runs,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_MIB = 2**20


@checkpoint.command("list", epilog="Examples:  bamboo checkpoint list  |  bamboo checkpoint list /data/kept --json")
def show(where: Where = "latest", *, results: Results = DEFAULT_RESULTS, as_json: AsJson = False) -> None:
    """List checkpoints by step, with loss and size. Parts are not read; `verify` does that."""
    place = _place(where, results)
    _print(place, [_row(place, name, reads_parts=False) for name in _names(place)], as_json)


@checkpoint.command(epilog="Examples:  bamboo checkpoint verify  |  bamboo checkpoint verify 20261123-1200@479 --json")
def verify(where: Where = "latest", *, results: Results = DEFAULT_RESULTS, as_json: AsJson = False) -> None:
    """Read every byte of checkpoints and compare sizes and SHA-256. Exit with 1 and name the file if one is damaged.

    A damaged checkpoint is never loaded: training resumes from the newest good one.
    """
    place = _place(where, results)
    rows = [_row(place, name, reads_parts=True) for name in _names(place)]
    code = ExitCode.EXPECTATION_FAILED if any(row["problem"] for row in rows) else ExitCode.OK
    _print(place, rows, as_json, exit_code=int(code))
    if code:
        raise typer.Exit(code)


@checkpoint.command(epilog="Examples:  bamboo checkpoint prune --keep 1  |  bamboo checkpoint prune latest --dry-run")
def prune(
    where: Where = "latest",
    *,
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", help="Number of good checkpoints to keep, newest first.", min=1)
    ] = 3,
    unfinished: Annotated[
        bool,
        typer.Option(
            "--unfinished",
            help="Also delete unfinished checkpoints of runs that are not visible here (another machine, an object "
            "store). Make sure that no run is writing there.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the checkpoints to delete.")] = False,
    results: Results = DEFAULT_RESULTS,
    as_json: AsJson = False,
) -> None:
    """Delete all but the newest N good checkpoints of each run, after reading every byte of those N.

    Damaged checkpoints do not count. With fewer than N good ones, nothing is deleted. In a folder shared by several
    runs, the unfinished checkpoints of killed runs are deleted too.
    """
    from engine.files.checkpoint_folder import sweep

    place = _place(where, results)
    old = place.folder.old(keep, place.run, is_verified=True)
    rows = [_row(place, name, reads_parts=False) for name in old if place.step in (None, name.step)]
    for name in old if not dry_run else ():
        if place.step in (None, name.step):
            place.folder.remove(name)
    gone = sweep(place.folder.place, believed=unfinished, is_trial=dry_run)
    left = [each for each in place.folder.orphans() if each not in gone]
    if as_json:
        parts = {"parts_deleted": gone, "parts_left": left}
        echo(json.dumps({"place": place.folder.place, "dry_run": dry_run, "deleted": rows, **parts}))
        return
    verb = "to delete" if dry_run else "deleted"
    for row in rows:
        echo(f"{verb}: step {row['step']} ({row['file']})")
    size = sum(row["bytes"] for row in rows)
    echo(f"{verb}: {counted(len(rows), 'checkpoint')}, {size / _MIB:.1f} MiB, in {place.folder.place!r}")
    if gone:
        echo(f"{verb}: {counted(len(gone), 'part')} of unfinished checkpoints")
    if left:
        echo(f"{counted(len(left), 'part')} of unfinished checkpoints left: a run may be writing there (--unfinished)")


def _place(where: str, results: Path) -> CheckpointPlace:
    from engine.files.jobs.checkpoint_place import checkpoint_places

    return next(checkpoint_places(where, results))


def _names(place: CheckpointPlace) -> tuple[CheckpointName, ...]:
    """Returns the checkpoints of a place; raises NothingMatchedError without one."""
    names = place.names()
    if not names:
        of_step = "" if place.step is None else f" of step {place.step}"
        raise NothingMatchedError(f"no checkpoint{of_step} in {place.folder.place!r}")
    return names


def _row(place: CheckpointPlace, name: CheckpointName, reads_parts: bool) -> dict[str, Any]:
    """Returns a checkpoint as plain values; `problem` names a wrong file, and is empty without one."""
    row: dict[str, Any] = {"step": name.step, "file": str(name), "problem": ""}
    try:
        manifest = place.folder.manifest(name)
        row |= {"run": manifest.run, "epoch": manifest.epoch, "loss": manifest.loss, "bytes": manifest.num_bytes}
        row |= {"layers": len(manifest.layers), "parts": len(manifest.parts)}
        if reads_parts:
            place.folder.verify(name)
    except StorageError as error:
        row["problem"] = str(error)
    return row


def _print(place: CheckpointPlace, rows: list[dict[str, Any]], as_json: bool, **more: object) -> None:
    if as_json:
        echo(json.dumps(finite({"place": place.folder.place, "checkpoints": rows, **more})))
        return
    from bamboo_cli.tables import print_table

    table = [
        [str(row["step"]), _loss(row), _mib(row), str(row.get("parts", "")), row.get("run", ""), _said(row, bool(more))]
        for row in rows
    ]
    is_number = (True, True, True, True, False, False)
    print_table(("step", "loss", "MiB", "parts", "run", "state"), is_number, table)
    for row in rows:
        if row["problem"]:
            echo(f"step {row['step']}: {row['problem']}")
    echo(f"{counted(len(rows), 'checkpoint')} in {place.folder.place!r}")


def _loss(row: dict[str, Any]) -> str:
    return f"{row['loss']:.6f}" if "loss" in row else ""


def _mib(row: dict[str, Any]) -> str:
    return f"{row['bytes'] / _MIB:.1f}" if "bytes" in row else ""


def _said(row: dict[str, Any], is_verified: bool) -> str:
    return "refused" if row["problem"] else "good" if is_verified else "not read"
