"""`bamboo agent`: the agent of one of several hosts; or adds a worker to a running job, and follows it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from bamboo_cli import completion
from bamboo_cli.echo import echo
from bamboo_cli.host_options import (
    Address,
    EndpointsOfHosts,
    Hosts,
    HostsWithin,
    InstructionSet,
    LeaseSeconds,
    Node,
    PlainHttp,
    RunId,
    TrustedNetwork,
    Workers,
    etcd_settings,
    fixing,
)
from bamboo_cli.job_options import JobValues, flag_of, flag_texts, resolve_options, takes_job_values
from bamboo_cli.run_options import DEFAULT_GRACE, Grace, Injectable, Kills, NoTwin, YesNo, grace_seconds, scenario_of
from bamboo_cli.run_result import print_result
from engine.core.errors import BambooError, Problem, UserError, noting
from engine.core.errors import problems_of as told
from engine.core.hosts.host_options import HostOptions, problems_of
from engine.core.job.job import Job

if TYPE_CHECKING:
    from engine.files.jobs.resolved_job import ResolvedJob
    from engine.harness.case import Case
    from engine.harness.host_agent import HostRunEnd
    from engine.runtime.store.etcd_settings import EtcdSettings


# The agent of one of several hosts: the same line on every host, and the same exit code.
def run_host(values: JobValues, flags: dict[str, Any], run: Callable[..., Any]) -> tuple[HostRunEnd, ResolvedJob]:
    """Runs the agent of this host to the end of the run; returns its end. Raises UserError with every mistake."""
    from bamboo_cli.live import screen
    from engine.harness.host_agent import run_on_hosts

    problems = fixing(flags["isa"])
    if flags["standby"]:
        hint = "workers that wait come with --set standby=N"
        problems.append(Problem("--standby", "none beside --hosts", "--standby", hint))
    etcd = noting(problems, lambda: etcd_settings(flags["etcd"], flags["etcd_plain_http"]))
    resolved, case = noting(problems, lambda: _case(values, flags)) or (None, None)
    options = _options(flags, etcd)
    problems += problems_of(options, resolved.job if resolved else None, is_own_address)
    if problems or etcd is None or resolved is None or case is None:  # which are problems too
        raise UserError(problems)
    job, picture, etcd = resolved.job, screen(), etcd.nearest(options.address)
    faults = "; ".join(f"{each.id}: {each.in_words(job.slot_noun)}" for each in case.faults)
    on = partial(run, case, etcd, picture)
    ended = run_on_hosts(job, case.name, replace(options, faults=faults), flags["patience_s"], etcd, picture, on)
    return ended, resolved


def _options(flags: dict[str, Any], etcd: EtcdSettings | None) -> HostOptions:
    endpoints = () if etcd is None else tuple(str(getattr(each, "host", "localhost")) for each in etcd.endpoints)
    named = endpoints or (flags["etcd"].partition(",")[0].rpartition(":")[0].strip("[]"),)
    address = flags["address"] or usual_address(named[0])
    asked = endpoints if etcd is not None or not flags["etcd"] else (flags["etcd"],)
    node = flags["node"] or socket.gethostname()
    rest = {name: flags[name] for name in ("workers", "trusted", "lease_s")}
    return HostOptions(flags["run_id"], flags["hosts"], node, address, asked, **rest)


def _case(values: JobValues, flags: dict[str, Any]) -> tuple[ResolvedJob, Case]:
    """Returns the job and the case of an agent: a job with kills, or a scenario; raises UserError with its mistakes."""
    from engine.core.checkpoint_rules import begun_with
    from engine.harness.case import case_of_job

    own = {"injectable": flags["injectable"], "run_id": flags["run_id"]}
    if values["job_file"] is not None and is_scenario(values["job_file"]):
        return _case_of_scenario(values, flags["kill"], own)
    resolved = resolve_options(values, moves=False)
    job, kills = resolved.job, flags["kill"]
    after, with_twin = begun_with(resolved.origin), not flags["no_twin"]
    problems: list[Problem] = []
    scenario = noting(problems, lambda: scenario_of(kills, job, with_twin=with_twin, after=after))
    grace_s = noting(problems, lambda: grace_seconds(flags["grace"]))
    if scenario is None or grace_s is None:
        raise UserError(problems)
    return resolved, case_of_job(resolved, scenario, grace_s=grace_s, **own)


def _case_of_scenario(values: JobValues, kills: list[str], own: dict[str, Any]) -> tuple[ResolvedJob, Case]:
    """Returns the case of a scenario, without the expectations that no host can check alone."""
    from engine.files.jobs.resolved_job import ResolvedJob
    from engine.files.jobs.scenario_file import load_scenario
    from engine.harness.case import case_of_file
    from engine.harness.job_checks import offered
    from engine.runtime.faults.registry import kinds

    changed = [*(values["set"] or ()), *(f"{name}={text}" for name, text in flag_texts(values).items())]
    load = partial(
        load_scenario, str(values["job_file"]), kinds(), None, changed, offered.trusting(values["trust_code"])
    )
    if kills:
        beside = Problem("--kill", "none beside a scenario", ", ".join(kills), "a scenario has its own faults")
        raise UserError([beside, *told(load)])
    loaded = load()
    expect = loaded.scenario.expect
    if not_checked := [name for name in ("samples", "leftovers") if getattr(expect, name) is not None]:
        hint = "the records and the processes of the other hosts are there"
        echo(f"not checked on several hosts: {', '.join(not_checked)} ({hint})", err=True)
    scenario = replace(loaded.scenario, expect=replace(expect, samples=None, leftovers=None))
    case = replace(case_of_file(replace(loaded, scenario=scenario)), **own)
    return ResolvedJob(scenario.job, dict(loaded.origins), foreign=loaded.foreign), case


def is_scenario(path: Path) -> bool:
    """Whether it is a shipped scenario, or a file with one; what cannot be read is left to the reader of jobs."""
    from engine.files.jobs.job_layers import kind_of
    from engine.files.jobs.library import scenario_names
    from engine.files.strict_yaml import read_yaml

    with contextlib.suppress(BambooError):
        return kind_of(read_yaml(path)) == "scenario" if path.is_file() else str(path) in scenario_names()
    return False


def is_own_address(text: str) -> bool:
    """Whether an address is one of this host: a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((text, 0))
    except OSError:
        return False
    return True


def usual_address(etcd_host: str) -> str:
    """Returns the address from which this host reaches its etcd; loopback if it is not known."""
    try:
        (family, kind, _, _, place), *_ = socket.getaddrinfo(etcd_host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as trial:
            trial.connect(place)  # which sends nothing
            return str(trial.getsockname()[0])
    except (OSError, ValueError):  # ValueError: no name at all
        return "127.0.0.1"


EPILOG = (
    "Examples:  bamboo agent job.yaml --run 4711 --etcd 10.0.0.1:2379 --hosts 3 --trusted-network 10.0.0.0/8  |  "
    "bamboo agent --join latest  |  bamboo agent --join 20260101-120000-gpt-1a2b --standby"
)
_Join = Annotated[
    str,
    typer.Option(
        "--join",
        metavar="RUN",
        help="Add a worker to this run (name, folder or latest), which must be elastic or have --standby.",
        autocompletion=completion.runs,
    ),
]


@takes_job_values
def agent(
    values: JobValues,
    *,
    join: _Join = "",
    standby: Annotated[
        bool,
        typer.Option("--standby", help="With --join: wait for a failure instead of joining at the next step boundary."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
    hosts: Hosts = "",
    run_id: RunId = "",
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
    etcd: EndpointsOfHosts = "",
    etcd_plain_http: PlainHttp = False,
) -> None:
    """Train on several hosts, with one agent on each; or add a worker to a running job.

    For several hosts, run the same command on every host.
    """
    of_several = {"JOB": values["job_file"], "--hosts": hosts, "--run": run_id, "--workers": workers}
    of_several |= {flag_of(name): text for name, text in flag_texts({**values, "results": None}).items()}
    of_several |= {"--set": ", ".join(values["set"] or ())}
    of_several |= {"--node": node, "--address": address, "--trusted-network": trusted, "--isa": isa, "--etcd": etcd}
    of_several |= {"--kill": kill, "--grace": grace if grace != DEFAULT_GRACE else ""}
    if join and (beside := [name for name, value in of_several.items() if value]):
        hint = "the host of the run starts the worker, as its other ones"
        raise UserError([Problem(name, "none beside --join", str(of_several[name]), hint) for name in beside])
    if not hosts:
        _add_worker(join, Path(values["results"] or Job().results), is_standby=standby, as_json=as_json)
    from engine.harness.case_runner import run_case_on

    flags = {"isa": isa, "hosts": hosts, "run_id": run_id, "workers": workers, "node": node, "address": address}
    flags |= {"trusted": trusted, "lease_s": lease_s, "patience_s": patience_s}
    flags |= {"etcd": etcd, "etcd_plain_http": etcd_plain_http, "kill": kill or [], "no_twin": no_twin}
    flags |= {"grace": grace, "injectable": injectable is YesNo.YES, "standby": standby}
    raise typer.Exit(_printed(*run_host(values, flags, run_case_on), as_json))


def _printed(ended: HostRunEnd, resolved: ResolvedJob, as_json: bool) -> int:
    """Prints the end of a run on this host; returns the exit code."""
    if ended.result is not None:
        return print_result(ended.result, resolved, as_json)
    summary = {"run_dir": None, "outcome": ended.outcome.words, "exit_code": ended.outcome.code}
    echo(json.dumps(summary) if as_json else ended.outcome.words)
    return ended.outcome.code


def _add_worker(join: str, results: Path, *, is_standby: bool, as_json: bool) -> NoReturn:
    """Adds a worker; Ctrl-C gives it its notice, and it hands over and leaves."""
    from engine.harness.live_run import AddedWorker, run_to_join
    from engine.runtime.process.interrupts import holding

    if not join:
        hint = "such as: bamboo agent --join latest"
        raise UserError([Problem("--join", "a run", "none", f"{hint}; or --hosts N, for a run on several hosts")])
    folder = run_to_join(results, join)
    joined = AddedWorker(folder, is_standby=is_standby)
    with holding():
        for news in joined.follow():
            echo(json.dumps({"run_dir": str(folder.path), **news}) if as_json else news["text"])
    raise typer.Exit(joined.exit_code)
