"""`bamboo bench NAME`: measures ours and a peer, interleaved in one run.

Rules: rows go to stdout and progress to stderr; a goal that is not met is a finding, not an error of the program.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engine.bench.figures.rows import Row

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
    from engine.bench.session import bench_pipeline, pipeline_jobs

    jobs = pipeline_jobs()

    def measure(name: str, folder: Path) -> list[Row]:
        return bench_pipeline(name, jobs[name], 3 if quick else 20, folder)

    _run("pipeline", _each(case, jobs, measure), as_json, results)


@bench.command()
def schedules(
    quick: Quick = False, as_json: AsJson = False, case: Case = "", results: Results = _DEFAULT_RESULTS
) -> None:
    """Time of a step's forwards and backwards under each schedule, against its dry run and torch's schedule."""
    from engine.bench.figures.schedules import schedule_jobs
    from engine.bench.session import bench_schedule

    jobs = schedule_jobs()

    def measure(name: str, folder: Path) -> list[Row]:
        return bench_schedule(name, jobs[name], 3 if quick else 20, folder)

    _run("schedules", _each(case, jobs, measure), as_json, results)


@bench.command()
def launch(quick: Quick = False, as_json: AsJson = False, results: Results = _DEFAULT_RESULTS) -> None:
    """Time from the command to the end of the first optimizer step with 4 workers, against torchrun."""
    from engine.bench.runs import bench_launch

    _run("launch", lambda folder: bench_launch(1 if quick else 7, folder), as_json, results)


@bench.command()
def audit(quick: Quick = False, as_json: AsJson = False, results: Results = _DEFAULT_RESULTS) -> None:
    """Time of a step with an audit of each, against steps without any."""
    from engine.bench.runs import bench_audit

    _run("audit", lambda folder: bench_audit(*((1, 4) if quick else (5, 80)), folder), as_json, results)


@bench.command()
def recording(
    quick: Quick = False, as_json: AsJson = False, case: Case = "", results: Results = _DEFAULT_RESULTS
) -> None:
    """Time of a step whose actions are recorded, against that of one whose actions are not, in the same run."""
    from engine.bench.recording import bench_recording, recording_jobs

    jobs = recording_jobs()

    def measure(name: str, folder: Path) -> list[Row]:
        return bench_recording(name, jobs[name], 2 if quick else 60, folder)

    _run("recording", _each(case, jobs, measure), as_json, results)


@bench.command()
def kv(quick: Quick = False, as_json: AsJson = False, results: Results = _DEFAULT_RESULTS) -> None:
    """Time of a call to the coordinator's store and of a watch's news, against the bare etcd3 client."""
    from engine.bench.kv import bench_kv

    _run("kv", lambda folder: bench_kv(50 if quick else 10_000, folder), as_json, results)


@bench.command()
def coordination(quick: Quick = False, as_json: AsJson = False, results: Results = _DEFAULT_RESULTS) -> None:
    """Time from an exit to everybody's knowing of it, to form a group, and to start a private etcd: against limits."""
    from engine.bench.relay import bench_etcd_start, bench_forming, bench_relay

    def measure(folder: Path) -> list[Row]:
        rows = bench_relay(5 if quick else 200, folder)
        rows += bench_forming(3 if quick else 20, folder) + bench_etcd_start(1 if quick else 20, folder)
        return rows

    _run("coordination", measure, as_json, results)


@bench.command()
def recovery(
    quick: Quick = False, as_json: AsJson = False, case: Case = "", results: Results = _DEFAULT_RESULTS
) -> None:
    """Pause after a SIGKILL, in phases, against what must be redone; torchrun's restart; torchft, where installed."""
    from engine.bench.recovery import POINTS, bench_pause, recovery_cases
    from engine.bench.restart import bench_restart, bench_torchft, has_torchft

    cases = recovery_cases()
    peers = {"torchrun": bench_restart} | ({"torchft": bench_torchft} if has_torchft() else {})

    def measure(name: str, folder: Path) -> list[Row]:
        if name in peers:
            return peers[name](1 if quick else 5, folder)
        return bench_pause(cases[name], 1 if quick else 10, (0.5,) if quick else POINTS, folder)

    _run("recovery", _each(case, [*cases, *peers], measure), as_json, results)


@bench.command()
def redundancy(
    quick: Quick = False, as_json: AsJson = False, case: Case = "", results: Results = _DEFAULT_RESULTS
) -> None:
    """Time of a step and peak memory with lazy and eager redundancy, against none and what theory says."""
    from engine.bench.redundancy import MEMORY_CASE, bench_memory, bench_overhead, overhead_cases

    cases = overhead_cases()

    def measure(name: str, folder: Path) -> list[Row]:
        if name == MEMORY_CASE:
            return bench_memory(1 if quick else 3, folder, quick)
        return bench_overhead(name, cases[name], 1 if quick else 5, 4 if quick else 12, folder)

    _run("redundancy", _each(case, [*cases, MEMORY_CASE], measure), as_json, results)


@bench.command()
def buffers(
    quick: Quick = False, as_json: AsJson = False, case: Case = "", results: Results = _DEFAULT_RESULTS
) -> None:
    """Time of a step and peak memory with a buffer that a shadow keeps, against none and against no buffer."""
    from engine.bench.buffers import bench_buffers, buffer_cases

    cases = buffer_cases()

    def measure(name: str, folder: Path) -> list[Row]:
        return bench_buffers(name, cases[name], *((1, 3) if quick else (5, 12)), folder)

    _run("buffers", _each(case, cases, measure), as_json, results)


@bench.command()
def programs(quick: Quick = False, as_json: AsJson = False, results: Results = _DEFAULT_RESULTS) -> None:
    """Time to make and verify a large program, and to plan a large recovery, against limits."""
    from engine.bench.programs import bench_programs

    _run("programs", lambda folder: bench_programs(1 if quick else 5), as_json, results)


@bench.command()
def handover(quick: Quick = False, as_json: AsJson = False, results: Results = _DEFAULT_RESULTS) -> None:
    """What a SIGTERM with enough grace costs, and a step with one worker less, against limits and theory."""
    from engine.bench.handover import bench_handover

    sizes = (1, 1) if quick else (30, 4)
    _run("handover", lambda folder: bench_handover(*sizes, folder), as_json, results)


@bench.command()
def matrix(quick: Quick = False, as_json: AsJson = False, case: Case = "", results: Results = _DEFAULT_RESULTS) -> None:
    """Time of a real fault case in a matrix, against the same case as a command of its own."""
    from engine.bench.matrix import bench_matrix

    def measure(folder: Path) -> list[Row]:
        rows = bench_matrix(folder, case or ("kill/F" if quick else ""), 1 if quick else 5)
        typer.echo(f"{60 / rows[0].ours:.0f} cases per minute", err=True)
        return rows

    _run("matrix", measure, as_json, results)


def _each(
    case: str, names: Collection[str], measure: Callable[[str, Path], Sequence[Row]]
) -> Callable[[Path], Sequence[Row]]:
    """Returns what measures, one after another, the cases whose names contain `case`; each is named on stderr.

    Raises:
        NothingMatchedError: there is no such case.
    """
    from engine.core.errors import NothingMatchedError, nearest

    found = [name for name in names if case in name]
    if not found:
        hint = nearest(case, names)
        raise NothingMatchedError(f"no case {case!r}" + (f" ({hint})" if hint else ""))

    def measure_found(folder: Path) -> list[Row]:
        rows: list[Row] = []
        for name in found:
            typer.echo(f"{name} (load {os.getloadavg()[0]:.2f})", err=True)
            rows += measure(name, folder)
        return rows

    return measure_found


def _run(name: str, measure: Callable[[Path], Sequence[Row]], as_json: bool, results: Path) -> None:
    """Measures, writes the CSV and prints the rows: as a table, or as JSON.

    Ctrl-C and SIGTERM end the program by way of every `finally`, so that nothing is left behind.
    """
    from engine.bench.results_file import bench_folder, write_bench

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    folder = bench_folder(results)
    rows = measure(folder)
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
