"""`bamboo agent`: the agent of one of several hosts; or adds a worker to a running job, and follows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bamboo_cli.options import completion
from bamboo_cli.options.etcd import Endpoints, PlainHttp
from bamboo_cli.options.trust import TrustCode
from bamboo_cli.terminal.echo import echo
from engine.core.errors import Problem, UserError

EPILOG = (
    "Examples:  bamboo agent job.yaml --run 4711 --etcd 10.0.0.1:2379 --hosts 3 --trusted-network 10.0.0.0/8  |  "
    "bamboo agent --join latest  |  bamboo agent --join 20260101-120000-gpt-1a2b --standby"
)
_RESULTS = Path("results")
_PANEL = "Several hosts"

_Join = Annotated[
    str,
    typer.Option(
        "--join",
        metavar="RUN",
        help="The run, named as its folder is; or its folder; or latest. It was started with --elastic or --standby.",
        autocompletion=completion.runs,
    ),
]
_JobFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="JOB.yaml",
        help="Of a run on several hosts: its job file",
        show_default=False,
        autocompletion=completion.job_files,
    ),
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any field of the job, such as stages=4 or model_args.width=64; repeatable.",
        rich_help_panel=_PANEL,
    ),
]
_Hosts = Annotated[
    str,
    typer.Option(
        "--hosts",
        metavar="N|NAME,NAME",
        help="The number of hosts of the run, or their names. The same line starts the agent of each.",
        rich_help_panel=_PANEL,
    ),
]


def agent(
    job_file: _JobFile = None,
    join: _Join = "",
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait for a failure; else the worker joins at a step boundary soon.")
    ] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder of the run folders.")] = _RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
    hosts: _Hosts = "",
    run_id: Annotated[
        str, typer.Option("--run", metavar="ID", help="The run in the store.", rich_help_panel=_PANEL)
    ] = "",
    settings: _Set = None,
    workers: Annotated[
        int, typer.Option("--workers", help="Room for workers on each host; 0: any.", rich_help_panel=_PANEL)
    ] = 0,
    node: Annotated[
        str,
        typer.Option("--node", metavar="NAME", help="This host; by default its host name.", rich_help_panel=_PANEL),
    ] = "",
    address: Annotated[
        str,
        typer.Option(
            "--address",
            metavar="IP",
            help="Of this host; by default the one from which it reaches etcd.",
            rich_help_panel=_PANEL,
        ),
    ] = "",
    trusted: Annotated[
        str,
        typer.Option(
            "--trusted-network",
            metavar="CIDR",
            help="Allow tensors in clear text between addresses of this network.",
            rich_help_panel=_PANEL,
        ),
    ] = "",
    lease_s: Annotated[
        int, typer.Option("--lease", metavar="SECONDS", help="Time to live of a host's lease.", rich_help_panel=_PANEL)
    ] = 5,
    patience_s: Annotated[
        float,
        typer.Option("--hosts-within", metavar="SECONDS", help="Wait for all hosts.", rich_help_panel=_PANEL),
    ] = 300.0,
    trust_code: TrustCode = False,
    etcd: Endpoints = "",
    etcd_plain_http: PlainHttp = False,
) -> None:
    """Train on several hosts, with one agent on each; or add a worker to a running job, and follow it."""
    if hosts and join:
        raise UserError([Problem("--join", "--hosts or --join", "both")])
    if hosts:
        from bamboo_cli.hosts.host_agent import run_host

        given = {"hosts": hosts, "run_id": run_id, "workers": workers, "node": node, "address": address}
        given |= {"trusted": trusted, "lease_s": lease_s, "patience_s": patience_s, "trust_code": trust_code}
        given |= {"etcd": etcd, "etcd_plain_http": etcd_plain_http}
        place = None if results == _RESULTS else results
        raise typer.Exit(run_host(job_file, settings or [], place, given, as_json=as_json))
    _join(join, results, is_standby=standby, as_json=as_json)


def _join(join: str, results: Path, *, is_standby: bool, as_json: bool) -> None:
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
