"""`bamboo bench NAME`: measures bamboo and a peer, interleaved in one run.

Rules: rows go to stdout, progress to stderr. A missed goal is a finding: the exit code stays 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo_cli.echo import echo

if TYPE_CHECKING:
    from engine.bench.figures import BenchRow, Cases
    from engine.bench.referee import RefereeRow

bench = typer.Typer(no_args_is_help=True, help="Measure bamboo and its peers, interleaved in one run.")

Quick = Annotated[bool, typer.Option("--quick", help="Measure only enough to check that the benchmark works.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")]
Results = Annotated[Path, typer.Option(help="Folder in which bench/NAME-TIME.csv is written.")]
Repeats = Annotated[int, typer.Option(min=1, help="Failures per kind; of power failures, a quarter as many.")]
Case = Annotated[
    str, typer.Option(metavar="TEXT", help="Run only the case with this name, or those whose name contains it.")
]


# Name of a benchmark -> the function in engine/bench that returns its cases, the help.
_BENCHMARKS = {
    "pipeline": (
        "session.pipeline_cases",
        "Time of the forwards and backwards of a step under each schedule, against torch.distributed.pipelining.",
    ),
    "launch": (
        "runs.launch_cases",
        "Time from the command to the end of the first optimizer step, against torchrun, and against transformers.",
    ),
    "links": (
        "hops.link_cases",
        "Hop time between two workers of a host, idle and beside a busy loop, against Gloo, torch and a bare socket.",
    ),
    "audit": ("runs.audit_cases", "Step time with --audit 1, against --audit 0."),
    "kv": ("kv.kv_cases", "Time of a call to the coordinator's store, against the bare etcd3 client."),
    "coordination": (
        "relay.coordination_cases",
        "Time to announce an exit, to form a group and to start a private etcd, against limits.",
    ),
    "recovery": (
        "recovery.pause_cases",
        "Pause after a SIGKILL, by phase, against the redone work; for other systems see referee.",
    ),
    "scale": (
        "scale.scale_cases",
        "Plan and pause after a SIGKILL as the number of workers grows, against a plan from scratch and fixed limits.",
    ),
    "redundancy": (
        "runs.redundancy_cases",
        "Step time and peak memory with lazy and eager redundancy, against theory and no redundancy.",
    ),
    "blocks": (
        "recovery.blocks_cases",
        "Step time, and pause after a SIGKILL, with four blocks per worker, against one.",
    ),
    "buffers": (
        "buffers.buffer_cases",
        "Step time and peak memory when shadows copy a layer's buffer, against no shadow and against no buffer.",
    ),
    "checkpoint": (
        "checkpoint.checkpoint_cases",
        "Step time with and without checkpoints, time to save and to resume, against torch's asynchronous save.",
    ),
    "events": (
        "events.events_cases",
        "Time and memory to report on a run with 1 GB of events, and time to record an action, against limits.",
    ),
    "loggers": (
        "loggers.logger_cases",
        "CPU time per step of the prometheus and otel loggers, against the step time and against no logger.",
    ),
    "notice": (
        "handover.notice_cases",
        "Redone work and pause after a SIGTERM with 0 to 120 s of grace (scaled down), against a kill.",
    ),
    "gpu": (
        "gpu.gpu_cases",
        "On a GPU: step time against PyTorch and torch's pipelining; cost of shadows, audit and determinism.",
    ),
    "handover": (
        "handover.handover_cases",
        "Cost of a SIGTERM with enough grace, and of a step with one worker fewer, against theory and fixed limits.",
    ),
}


def _register(name: str, function: str, help_text: str) -> None:
    """Adds the command of a benchmark; its module is imported when the command is called."""

    def command(
        quick: Quick = False, as_json: AsJson = False, case: Case = "", results: Results = Path("results")
    ) -> None:
        module, _, cases_of = function.rpartition(".")
        cases: Cases = getattr(import_module(f"engine.bench.{module}"), cases_of)(quick)
        _run(name, _chosen(case, cases), as_json, results)

    bench.command(name, help=help_text)(command)


@bench.command("hosts", help="Worker, agent and host failures on three hosts, against one host and fixed limits.")
def hosts(
    repeats: Repeats = 20,
    quick: Quick = False,
    as_json: AsJson = False,
    case: Case = "",
    results: Results = Path("results"),
) -> None:
    """Measures in hosts of namespaces, which need what `bamboo doctor` says."""
    from engine.bench.hosts import host_cases

    _run("hosts", _chosen(case, host_cases(quick, repeats)), as_json, results)


@bench.command("referee", help="Five scenarios on one job in each training system that is installed, as one table.")
def referee(
    only: Annotated[list[str] | None, typer.Option(metavar="SYSTEM", help="Run only this system; repeatable.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each scenario; each is a row.")] = 1,
    as_json: AsJson = False,
    case: Case = "",
    results: Results = Path("results"),
) -> None:
    """Runs each scenario, writes the CSV and prints the rows; after a signal those that were finished."""
    from engine.bench.figures import bench_folder, write_bench
    from engine.bench.referee import COLUMNS, SCENARIOS, SYSTEMS, referee_rows
    from engine.core.errors import NothingMatchedError, nearest
    from engine.runtime.process.interrupts import holding

    for name in only or ():
        if name not in SYSTEMS:
            raise NothingMatchedError(f"no system {name!r}", nearest(name, SYSTEMS))
    if not any(case in each for each in SCENARIOS):
        raise NothingMatchedError(f"no case {case!r}", nearest(case, SCENARIOS))
    folder, now, rows = bench_folder(results), datetime.now(), []
    with holding() as interrupts:
        runs = folder / f"referee-{now:%Y%m%d-%H%M%S}"
        for row in referee_rows(only or [*SYSTEMS], case, repeats, runs, interrupts, partial(echo, err=True)):
            rows.append(row)
    if as_json:
        echo(json.dumps([row.as_dict() for row in rows]))
    elif rows:
        _print_referee(rows)
    echo(str(write_bench(folder, "referee", now, [row.as_dict() for row in rows], COLUMNS)), err=True)
    raise typer.Exit(0 if interrupts.first is None else 128 + interrupts.first)


def _chosen(case: str, cases: Cases) -> Cases:
    """Returns the case that has the name `case`, or all whose names contain it.

    Raises:
        NothingMatchedError: there is no such case.
    """
    from engine.core.errors import NothingMatchedError, nearest

    matches = {name: measure for name, measure in cases.items() if name == case or (case in name and case not in cases)}
    if not matches:
        raise NothingMatchedError(f"no case {case!r}", nearest(case, cases))
    return matches


def _run(benchmark: str, cases: Cases, as_json: bool, results: Path) -> None:
    """Measures the cases, writes the CSV and prints the rows as a table or JSON, also after a signal."""
    from engine.bench.figures import bench_folder, write_bench
    from engine.runtime.process.interrupts import raising

    folder, code = bench_folder(results), 0
    rows: list[BenchRow] = []
    num_done = 0
    with raising() as interrupts:
        try:
            for name, measure in cases.items():
                echo(f"{name} (load {os.getloadavg()[0]:.2f})", err=True)
                rows += measure(folder)
                num_done += 1
        except SystemExit:  # each `finally` has run, and no process is left behind
            if interrupts.first is None:
                raise
            code = 128 + interrupts.first
            echo(f"interrupted after {num_done} of {len(cases)} cases", err=True)
    if as_json:
        echo(json.dumps([row.as_dict() for row in rows]))
    elif rows:
        _print_table(rows)
    if rows or not code:
        path = write_bench(folder, benchmark, datetime.now(), [row.as_dict() for row in rows])
        echo(f"{path} (load {os.getloadavg()[0]:.2f})", err=True)
    raise typer.Exit(code)


def _print_table(rows: Sequence[BenchRow]) -> None:
    from rich.text import Text

    from bamboo_cli.tables import BAD, GOOD, print_table
    from engine.bench.figures import verdict_on

    styles = {"yes": GOOD, "no": BAD}
    print_table(
        ("case", "metric", "ours", "peer", "ratio", "goal", "met", "n"),
        (False, False, True, True, True, True, False, True),
        [
            (
                *(row.case, row.metric, f"{row.ours:.4g}", f"{row.peer:.4g}", f"{row.ratio:.4g}"),
                *("" if row.goal is None else f"{row.goal:.4g}", Text(met, styles.get(met, "")), str(row.n)),
            )
            for row, met in zip(rows, map(verdict_on, rows), strict=True)
        ],
    )


def _print_referee(rows: Sequence[RefereeRow]) -> None:
    from bamboo_cli.tables import print_table

    print_table(
        ("system", "scenario", "outcome", "stall ms", "lost", "again", "bits", "blamed"),
        (False, False, False, True, True, True, False, False),
        [
            (
                *(row.system, row.scenario, row.outcome, "" if row.stall_ms is None else f"{row.stall_ms:.0f}"),
                *("" if number is None else str(number) for number in (row.lost, row.repeated)),
                *(row.bits, row.blame),
            )
            for row in rows
        ],
    )
    for row in rows:
        if row.why:
            echo(f"{row.system}{f' {row.scenario}' if row.scenario else ''}: {row.why}")
    for system, release, command in dict.fromkeys((row.system, row.version, row.command) for row in rows):
        echo(f"{system} {release}: {command}")


for _name, (_function, _help) in _BENCHMARKS.items():
    _register(_name, _function, _help)
