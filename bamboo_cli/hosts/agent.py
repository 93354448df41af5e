"""`bamboo agent`: the agent of one of several hosts; or adds a worker to a running job, and follows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from bamboo_cli.options import completion
from bamboo_cli.options.etcd import Endpoints, PlainHttp
from bamboo_cli.options.faults import DEFAULT_GRACE, Grace, Injectable, Kills, NoTwin, YesNo
from bamboo_cli.options.hosts import (
    Address,
    Hosts,
    HostsWithin,
    InstructionSet,
    JobFile,
    LeaseSeconds,
    Node,
    RunId,
    Settings,
    TrustedNetwork,
    Workers,
)
from bamboo_cli.options.trust import TrustCode
from bamboo_cli.terminal.echo import echo
from bamboo_cli.terminal.run_result import print_result
from engine.core.errors import Problem, UserError

if TYPE_CHECKING:
    from engine.files.jobs.resolved_job import Resolved
    from engine.harness.hosts.coordinating import HostRunEnd

EPILOG = (
    "Examples:  bamboo agent job.yaml --run 4711 --etcd 10.0.0.1:2379 --hosts 3 --trusted-network 10.0.0.0/8  |  "
    "bamboo agent --join latest  |  bamboo agent --join 20260101-120000-gpt-1a2b --standby"
)
_RESULTS = Path("results")

_Join = Annotated[
    str,
    typer.Option(
        "--join",
        metavar="RUN",
        help="The run, named as its folder is; or its folder; or latest. It was started with --elastic or --standby.",
        autocompletion=completion.runs,
    ),
]


def agent(
    job_file: JobFile = None,
    join: _Join = "",
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait for a failure; else the worker joins at a step boundary soon.")
    ] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder of the run folders.")] = _RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
    hosts: Hosts = "",
    run_id: RunId = "",
    settings: Settings = None,
    workers: Workers = 0,
    node: Node = "",
    address: Address = "",
    trusted: TrustedNetwork = "",
    lease_s: LeaseSeconds = 5,
    patience_s: HostsWithin = 300.0,
    isa: InstructionSet = "",
    kill: Kills = None,
    no_twin: NoTwin = False,
    grace: Grace = DEFAULT_GRACE,
    injectable: Injectable = YesNo.YES,
    trust_code: TrustCode = False,
    etcd: Endpoints = "",
    etcd_plain_http: PlainHttp = False,
) -> None:
    """Train on several hosts, with one agent on each; or add a worker to a running job, and follow it."""
    of_several = {"JOB": job_file, "--hosts": hosts, "--run": run_id, "--set": settings, "--workers": workers}
    of_several |= {"--node": node, "--address": address, "--trusted-network": trusted, "--isa": isa, "--etcd": etcd}
    of_several |= {"--kill": kill, "--grace": grace if grace != DEFAULT_GRACE else ""}
    if join and (beside := [name for name, value in of_several.items() if value]):
        hint = "the host of the run starts the worker, as its other ones"
        raise UserError([Problem(name, "none beside --join", str(of_several[name]), hint) for name in beside])
    if not hosts:
        _add_worker(join, results, is_standby=standby, as_json=as_json)
    from bamboo_cli.hosts.host_agent import run_host
    from engine.harness.case_runner import run_case

    given = {"isa": isa, "hosts": hosts, "run_id": run_id, "workers": workers, "node": node, "address": address}
    given |= {"trusted": trusted, "lease_s": lease_s, "patience_s": patience_s, "trust_code": trust_code}
    given |= {"etcd": etcd, "etcd_plain_http": etcd_plain_http, "kill": kill or [], "no_twin": no_twin}
    given |= {"grace": grace, "injectable": injectable is YesNo.YES, "standby": standby}
    place = None if results == _RESULTS else results
    raise typer.Exit(_printed(*run_host(job_file, settings or [], place, given, run_case), as_json))


def _printed(ended: HostRunEnd, resolved: Resolved, as_json: bool) -> int:
    """Prints the end of a run on this host; returns the exit code."""
    if ended.result is not None:
        return print_result(ended.result, resolved, as_json)
    told = {"run_dir": None, "outcome": ended.outcome.words, "exit_code": ended.outcome.code}
    echo(json.dumps(told) if as_json else ended.outcome.words)
    return ended.outcome.code


def _add_worker(join: str, results: Path, *, is_standby: bool, as_json: bool) -> NoReturn:
    """Adds a worker; Ctrl-C gives it its notice, and it hands over and leaves."""
    from engine.harness.join_run import Joined, run_to_join
    from engine.runtime.process.interrupts import holding

    if not join:
        hint = "such as: bamboo agent --join latest"
        raise UserError([Problem("--join", "a run", "none", f"{hint}; or --hosts N, for a run on several hosts")])
    folder = run_to_join(results, join)
    joined = Joined(folder, is_standby=is_standby)
    with holding():
        for told in joined.follow():
            echo(json.dumps({"run_dir": str(folder.path), **told}) if as_json else told["text"])
    raise typer.Exit(joined.exit_code)
