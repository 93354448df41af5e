"""The options of an agent on one of several hosts; `--isa` is one of `bamboo run` too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.core.errors import Problem, UserError, problems_of

if TYPE_CHECKING:
    from engine.core.history.process_records import StoreRecord
    from engine.files.jobs.scenario_file import LoadedScenario
    from engine.runtime.store.etcd_settings import EtcdSettings


# The options for a kept etcd cluster as the coordinator's store; without them a run starts a private one.
def _endpoints(about: str) -> Any:
    metavar, panel = "HOST:PORT[,HOST:PORT]", "Coordination"
    return typer.Option("--etcd", envvar="BAMBOO_ETCD", metavar=metavar, help=about, rich_help_panel=panel)


_CREDENTIALS = "TLS and credentials: BAMBOO_ETCD_CA, _CERT, _KEY, _USER, _PASSWORD or _PASSWORD_FILE."
Endpoints = Annotated[str, _endpoints(f"Use this etcd cluster instead of a private etcd. {_CREDENTIALS}")]
EndpointsOfHosts = Annotated[str, _endpoints(f"The etcd cluster of all hosts; several hosts need one. {_CREDENTIALS}")]
EndpointsOfRun = Annotated[
    str,
    _endpoints(
        "The etcd cluster of the run. A run folder could name any address, so bamboo connects only to addresses given "
        "here, or to the private etcd of your own run on this host."
    ),
]
PlainHttp = Annotated[
    bool,
    typer.Option(
        "--etcd-plain-http", help="Allow plain HTTP to an etcd on another host.", rich_help_panel="Coordination"
    ),
]


def settings_of_run(logs: Path, store: StoreRecord, named: str, plain_http: bool) -> EtcdSettings | None:
    """Returns the settings for the store that a run folder names; None if the user did not name that store.

    Another user may have written the record. So the user's endpoints and credentials are taken, never the record's, and
    a private store is asked, without credentials, through its socket in `logs` of the run, if it is this user's.
    Raises UserError for a mistake in the user's settings.
    """
    from engine.runtime.store.etcd_settings import private_settings

    if store.private:
        return private_settings(logs)
    settings = etcd_settings(named, plain_http)
    is_named = settings is not None and not set(store.endpoints).isdisjoint(map(str, settings.endpoints))
    return settings if is_named else None


def etcd_settings(endpoints: str, plain_http: bool, environment: Mapping[str, str] = os.environ) -> EtcdSettings | None:
    """Returns the settings of the kept cluster, or None for a private one; raises UserError with every problem."""
    from engine.runtime.store.etcd_settings import read_settings

    source = "--etcd" if environment.get("BAMBOO_ETCD") != endpoints else "BAMBOO_ETCD"
    return read_settings(endpoints, environment, allow_plain_http=plain_http, source=source) if endpoints else None


_host_option = partial(typer.Option, rich_help_panel="Several hosts")
_LEASE = "Lifetime of a host's lease in etcd: a host that does not renew it in time is lost."

Settings = Annotated[
    list[str] | None,
    _host_option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set a field of the job, such as stages=4 or model_args.width=64; repeatable.",
    ),
]
Hosts = Annotated[str, _host_option("--hosts", metavar="N|NAME,NAME", help="Number of hosts, or their names.")]
RunId = Annotated[str, _host_option("--run", metavar="ID", help="ID of the run in etcd; the same on every host.")]
Workers = Annotated[
    int, _host_option("--workers", metavar="K", help="Maximum number of workers per host; 0: no limit.")
]
Node = Annotated[str, _host_option("--node", metavar="NAME", help="Name of this host (default: its host name).")]
Address = Annotated[
    str,
    _host_option("--address", metavar="IP", help="Address of this host (default: the one from which it reaches etcd)."),
]
TrustedNetwork = Annotated[
    str,
    _host_option(
        "--trusted-network", metavar="CIDR", help="Send tensors without TLS between addresses in this network."
    ),
]
LeaseSeconds = Annotated[int, _host_option("--lease", metavar="SECONDS", help=_LEASE)]
HostsWithin = Annotated[
    float, _host_option("--hosts-within", metavar="SECONDS", min=0.0, help="Longest wait for all hosts to start.")
]
InstructionSet = Annotated[
    str,
    typer.Option(
        "--isa", metavar="SET", help="Use the same instruction set on every processor: portable, avx2 or avx512."
    ),
]


def fixing(isa: str) -> list[Problem]:
    """Fixes the instruction set, if one is named; returns the problems. No fact of this host is to be read before."""
    from engine.files.host_facts import fix_instruction_set

    return problems_of(lambda: fix_instruction_set(isa)) if isa else []


# `bamboo inject --hosts`: a scenario on hosts to break, which are made of namespaces of this machine.
_bed_option = partial(typer.Option, rich_help_panel="Hosts to break")

BedHosts = Annotated[
    int,
    _bed_option(
        "--hosts",
        metavar="N",
        help="Run on N simulated hosts (namespaces on this machine), which are removed afterwards.",
    ),
]
BedLease = Annotated[int, _bed_option("--lease", metavar="SECONDS", help=_LEASE)]


def problems_of_bed(hosts: int, lease_s: int, beside: Mapping[str, object]) -> list[Problem]:
    """Returns the mistakes in the options of hosts to break; `beside` are options that do not go with them."""
    if not hosts:
        return []
    from engine.core.faults.fault import LEAST_HOSTS, MEMBERS, MOST_HOSTS
    from engine.core.hosts.ends import LEAST_S, MOST_S

    problems = []
    if not LEAST_HOSTS <= hosts <= MOST_HOSTS:
        hint = f"etcd has {MEMBERS} members, each on a host"
        problems.append(Problem("--hosts", f"{LEAST_HOSTS} to {MOST_HOSTS}", str(hosts), hint))
    if not LEAST_S <= lease_s <= MOST_S:
        problems.append(Problem("--lease", f"{LEAST_S} to {MOST_S} seconds", str(lease_s)))
    hint = "the hosts and their etcd are made for this run"
    values = {name: value for name, value in beside.items() if value and value != os.environ.get("BAMBOO_ETCD")}
    return problems + [Problem(name, "nothing beside --hosts", str(value), hint) for name, value in values.items()]


def refuse_job_on_bed(hosts: int, lease_s: int, loaded: LoadedScenario) -> None:
    """Raises UserError with the mistakes in the job of a scenario that is to run on so many hosts."""
    from engine.core.hosts.host_options import HostOptions, problems_of
    from engine.harness.testbed import NETWORK

    if not hosts:
        return
    address = NETWORK.partition("/")[0]
    options = HostOptions("bed", str(hosts), "h0", address, (address,), trusted=NETWORK, lease_s=lease_s)
    if problems := problems_of(options, loaded.scenario.job, lambda _: True):
        raise UserError(problems)
