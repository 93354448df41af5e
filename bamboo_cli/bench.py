"""`bamboo bench NAME`: measures ours and a peer, interleaved in one run.

Rules: rows go to stdout and progress to stderr; a goal that is not met is a finding, not an error of the program.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engine.core.bench_rows import Row

bench = typer.Typer(no_args_is_help=True, help="Measure bamboo beside its peers, interleaved in one run.")

Quick = Annotated[bool, typer.Option("--quick", help="Measure just enough to see that it works.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")]
Results = Annotated[Path, typer.Option(help="Folder that receives bench/NAME-TIME.csv.")]
Case = Annotated[str, typer.Option(metavar="TEXT", help="Only the cases whose name contains this.")]

_DEFAULT_RESULTS = Path("results")


@bench.command()
def pipeline(
    quick: Quick = False, as_json: AsJson = False, case: Case = "", results: Results = _DEFAULT_RESULTS
) -> None:
    """Time of a step's forwards and backwards, against torch.distributed.pipelining and the ideal time."""
    from engine.files.bench_file import bench_folder
    from engine.runtime.bench_session import bench_pipeline, pipeline_jobs

    jobs = pipeline_jobs()
    names = _matching(case, jobs)
    _end_by_exception()
    folder = bench_folder(results)
    rows: list[Row] = []
    for name in names:
        typer.echo(f"{name} (load {os.getloadavg()[0]:.2f})", err=True)
        rows += bench_pipeline(name, jobs[name], 3 if quick else 20, folder)
    _show("pipeline", rows, as_json, folder)


@bench.command()
def launch(quick: Quick = False, as_json: AsJson = False, results: Results = _DEFAULT_RESULTS) -> None:
    """Time from the command to the end of the first optimizer step with 4 workers, against torchrun."""
    from engine.files.bench_file import bench_folder
    from engine.runtime.bench_runs import bench_launch

    _end_by_exception()
    folder = bench_folder(results)
    _show("launch", bench_launch(1 if quick else 7, folder), as_json, folder)


@bench.command()
def audit(quick: Quick = False, as_json: AsJson = False, results: Results = _DEFAULT_RESULTS) -> None:
    """Time of a step with an audit of each, against steps without any."""
    from engine.files.bench_file import bench_folder
    from engine.runtime.bench_runs import bench_audit

    _end_by_exception()
    folder = bench_folder(results)
    rows = bench_audit(1, 4, folder) if quick else bench_audit(5, 80, folder)
    _show("audit", rows, as_json, folder)


@bench.command()
def kv(quick: Quick = False, as_json: AsJson = False, results: Results = _DEFAULT_RESULTS) -> None:
    """Time of a call to the coordinator's store and of a watch's news, against the bare etcd3 client."""
    from engine.files.bench_file import bench_folder
    from engine.runtime.bench_kv import bench_kv

    _end_by_exception()
    folder = bench_folder(results)
    _show("kv", bench_kv(50 if quick else 2000, folder), as_json, folder)


@bench.command()
def coordination(quick: Quick = False, as_json: AsJson = False, results: Results = _DEFAULT_RESULTS) -> None:
    """Time from an exit to everybody's knowing of it, to form a group, and to start a private etcd: against limits."""
    from engine.files.bench_file import bench_folder
    from engine.runtime.bench_relay import bench_etcd_start, bench_forming, bench_relay

    _end_by_exception()
    folder = bench_folder(results)
    rows = bench_relay(5 if quick else 200, folder)
    rows += bench_forming(3 if quick else 20, folder) + bench_etcd_start(1 if quick else 20, folder)
    _show("coordination", rows, as_json, folder)


@bench.command()
def recovery(
    quick: Quick = False, as_json: AsJson = False, case: Case = "", results: Results = _DEFAULT_RESULTS
) -> None:
    """Pause after a SIGKILL, in phases, against what must be computed again; and against torchrun's restart."""
    from engine.files.bench_file import bench_folder
    from engine.runtime.bench_recovery import POINTS, bench_pause, bench_restart, recovery_cases

    cases = recovery_cases()
    names = _matching(case, [*cases, "torchrun"])
    _end_by_exception()
    folder = bench_folder(results)
    rows: list[Row] = []
    for name in names:
        typer.echo(f"{name} (load {os.getloadavg()[0]:.2f})", err=True)
        if name == "torchrun":
            rows += bench_restart(1 if quick else 5, folder)
        else:
            rows += bench_pause(cases[name], 1 if quick else 10, (0.5,) if quick else POINTS, folder)
    _show("recovery", rows, as_json, folder)


@bench.command()
def redundancy(
    quick: Quick = False, as_json: AsJson = False, case: Case = "", results: Results = _DEFAULT_RESULTS
) -> None:
    """Time of a step and peak memory with lazy and eager redundancy, against none and what theory says."""
    from engine.files.bench_file import bench_folder
    from engine.runtime.bench_redundancy import MEMORY_CASE, bench_memory, bench_overhead, overhead_cases

    cases = overhead_cases()
    names = _matching(case, [*cases, MEMORY_CASE])
    _end_by_exception()
    folder = bench_folder(results)
    rows: list[Row] = []
    for name in names:
        typer.echo(f"{name} (load {os.getloadavg()[0]:.2f})", err=True)
        if name == MEMORY_CASE:
            rows += bench_memory(folder, quick)
        else:
            rows += bench_overhead(name, cases[name], 1 if quick else 5, 4 if quick else 12, folder)
    _show("redundancy", rows, as_json, folder)


@bench.command()
def matrix(quick: Quick = False, as_json: AsJson = False, case: Case = "", results: Results = _DEFAULT_RESULTS) -> None:
    """Time of a real fault case in a matrix, against the same case as a command of its own."""
    from engine.files.bench_file import bench_folder
    from engine.runtime.bench_matrix import bench_matrix

    _end_by_exception()
    folder = bench_folder(results)
    rows = bench_matrix(folder, case or ("kill/F" if quick else ""), 1 if quick else 5)
    typer.echo(f"{60 / rows[0].ours:.0f} cases per minute", err=True)
    _show("matrix", rows, as_json, folder)


def _matching(case: str, names: Collection[str]) -> list[str]:
    """Returns the names that contain `case`; raises NothingMatchedError where none does."""
    from engine.core.errors import NothingMatchedError, nearest

    found = [name for name in names if case in name]
    if not found:
        hint = nearest(case, names)
        raise NothingMatchedError(f"no case {case!r}" + (f" ({hint})" if hint else ""))
    return found


def _end_by_exception() -> None:
    """Has Ctrl-C and SIGTERM end the program by way of every `finally`, so that nothing is left behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


def _show(name: str, rows: Sequence[Row], as_json: bool, folder: Path) -> None:
    """Writes the CSV and prints the rows: as a table, or as JSON."""
    from engine.files.bench_file import write_bench

    path = write_bench(folder, name, datetime.now(), rows)
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows]))
    else:
        _print_table(rows)
    typer.echo(f"{path} (load {os.getloadavg()[0]:.2f})", err=True)


def _print_table(rows: Sequence[Row]) -> None:
    lines: list[tuple[str, ...]] = [("case", "metric", "ours", "peer", "ratio", "goal", "met", "n")]
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:.4g}"
        met = {True: "yes", False: "no", None: ""}[row.met]
        figures = (f"{value:.4g}" for value in (row.ours, row.peer, row.ratio))
        lines.append((row.case, row.metric, *figures, goal, met, str(row.n)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    colours = {"yes": typer.colors.GREEN, "no": typer.colors.RED}
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        cells[6] = typer.style(cells[6], fg=colours.get(line[6]))
        typer.echo("  ".join(cells).rstrip())
