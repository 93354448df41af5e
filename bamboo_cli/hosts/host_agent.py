"""The agent of one of several hosts: the same line on every host, and the same exit code."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bamboo_cli.options.etcd import etcd_settings
from bamboo_cli.options.job import FLAG_FIELDS, resolve_options
from engine.core.errors import Problem, UserError
from engine.core.hosts.host_options import HostOptions, problems_of

if TYPE_CHECKING:
    from engine.files.jobs.resolved_job import Resolved
    from engine.harness.hosts.coordinating import HostRunEnd
    from engine.runtime.store.etcd_settings import EtcdSettings


def run_host(
    job_file: Path | None,
    settings: list[str],
    results: Path | None,
    given: dict[str, Any],
    run: Callable[..., Any],
) -> tuple[HostRunEnd, Resolved]:
    """Runs the agent of this host to the end of the run; returns its end. Raises UserError with every mistake."""
    from bamboo_cli.terminal.live import screen
    from engine.harness.hosts.host_run import run_on_hosts

    problems: list[Problem] = []
    etcd = _etcd(given, problems)
    values = dict.fromkeys(FLAG_FIELDS) | {"results": None if results is None else str(results)}
    values |= {"job_file": job_file, "set": settings, "trust_code": given["trust_code"]}
    resolved = resolve_options(values, program_only=False, is_plan=False)
    options = _options(given, etcd)
    problems += problems_of(options, resolved.job, is_own_address)
    if problems or etcd is None:  # which is a problem too
        raise UserError(problems)
    case, seen = _case(resolved, options), screen()
    on = partial(run, case, etcd, seen)
    ended = run_on_hosts(resolved.job, case.name, options, given["patience_s"], etcd, seen, on)
    return ended, resolved


def _etcd(given: dict[str, Any], problems: list[Problem]) -> EtcdSettings | None:
    try:
        return etcd_settings(given["etcd"], given["etcd_plain_http"])
    except UserError as error:
        problems += error.problems
        return None


def _options(given: dict[str, Any], etcd: EtcdSettings | None) -> HostOptions:
    endpoints = () if etcd is None else tuple(str(getattr(each, "host", "localhost")) for each in etcd.endpoints)
    named = endpoints or (given["etcd"],)
    address = given["address"] or usual_address(named[0])
    asked = endpoints if etcd is not None or not given["etcd"] else (given["etcd"],)
    node = given["node"] or socket.gethostname()
    rest = {name: given[name] for name in ("workers", "trusted", "lease_s")}
    return HostOptions(given["run_id"], given["hosts"], node, address, asked, **rest)


def _case(resolved: Resolved, options: HostOptions) -> Any:
    from bamboo_cli.options.faults import scenario_of
    from engine.core.checkpoints.resumption import begun_with
    from engine.harness.cases.case import Case, folder_name

    job = resolved.job
    scenario = scenario_of((), job, with_twin=False, after=begun_with(resolved.origin))
    name = job.name or folder_name(job.model.rpartition(":")[2].replace("_", "-"), "model")
    return Case(name, scenario, (), resolved.origins, injectable=False, init=resolved.init, run_id=options.run_id)


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
    except OSError:
        return "127.0.0.1"
