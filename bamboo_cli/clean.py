"""`bamboo clean`: deletes the files that killed runs left behind and, if the user asks, old runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo_cli.echo import echo
from bamboo_cli.report import DEFAULT_RESULTS, Results
from engine.core.errors import Problem, UserError
from engine.core.texts import counted

if TYPE_CHECKING:
    from engine.harness.run_list import Leftover, OldRuns


EPILOG = (
    "Examples:  bamboo clean --dry-run  |  bamboo clean  |  bamboo clean --keep 20  |  "
    "bamboo clean --older-than 7d --keep 5"
)
_DAY_S = 86_400


def clean(
    *,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            metavar="N",
            help="Also delete all but the newest N runs, N matrices and N runs of other launchers.",
            min=0,
        ),
    ] = None,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Also delete runs and matrices older than this: 7d, 12h.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files to delete, with their size.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    results: Results = DEFAULT_RESULTS,
) -> None:
    """Delete the files that killed runs left behind: etcd data, temporary files, twins that no run can reuse.

    Runs are deleted only with --keep or --older-than; with both, the newest N stay whatever their age. Running jobs
    and files that bamboo did not write are never touched.
    """
    from engine.files.jobs.library import EXTERNAL_FOLDER
    from engine.files.run_folder import disk_bytes, point_latest_to_newest
    from engine.harness.run_list import delete, leftovers

    candidates, busy = leftovers(results, _old_runs(keep, older_than))
    rows = []
    for leftover in candidates:
        num_bytes = leftover.num_bytes
        paths = [] if dry_run else delete(leftover)
        rows.append((leftover, num_bytes - sum(map(disk_bytes, paths)), paths))
    if not dry_run:
        point_latest_to_newest(results)
        point_latest_to_newest(results / EXTERNAL_FOLDER)
    if as_json:
        echo(json.dumps(_plain(results, rows, busy, dry_run)))
    else:
        _print(results, rows, busy, dry_run)


def _old_runs(keep: int | None, older_than: str) -> OldRuns | None:
    from engine.harness.run_list import OldRuns

    if keep is None and not older_than:
        return None
    return OldRuns(keep or 0, _seconds(older_than) if older_than else 0.0)


def _seconds(text: str) -> float:
    """Returns the seconds of an age such as ``7d``; raises UserError for other texts."""
    from engine.core.units import parse_duration

    if text.endswith("d") and text[:-1].isascii() and text[:-1].isdigit():
        return float(text[:-1]) * _DAY_S
    age_ns = parse_duration(text)
    if age_ns is None:
        raise UserError([Problem("--older-than", "an age such as 7d, 12h or 30m", repr(text))])
    return age_ns / 1e9


def _plain(
    results: Path, rows: list[tuple[Leftover, int, list[Path]]], busy: list[str], dry_run: bool
) -> dict[str, Any]:
    plain = [
        {"what": leftover.what, "path": str(leftover.path), "bytes": num_bytes, "kept": [str(path) for path in paths]}
        for leftover, num_bytes, paths in rows
    ]
    total = sum(num_bytes for _, num_bytes, _ in rows)
    return {"results": str(results), "dry_run": dry_run, "bytes": total, "leftovers": plain, "running": busy}


def _print(results: Path, rows: list[tuple[Leftover, int, list[Path]]], busy: list[str], dry_run: bool) -> None:
    from bamboo_cli.tables import print_table

    table = [[each.what, str(each.path.relative_to(results)), _mib(num_bytes)] for each, num_bytes, _ in rows]
    print_table(("what", "where", "MiB"), (False, False, True), table)
    for leftover, _, paths in rows:
        if paths:
            echo(f"{leftover.path} stays: it is in use again, or has files that bamboo did not write", err=True)
    total = _mib(sum(num_bytes for _, num_bytes, _ in rows))
    verb = "to delete" if dry_run else "deleted"
    echo(f"{verb}: {total} MiB in {counted(len(rows), 'place')}" if rows else f"nothing to delete in {str(results)!r}")
    if busy:
        echo(f"left alone, because it is still running: {', '.join(busy)}")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
