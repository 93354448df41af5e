"""`bamboo inject --hosts`: a scenario on hosts to break, which are made of namespaces of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from engine.core.errors import Problem, UserError
from engine.core.faults.host_fault import LEAST_HOSTS, MEMBERS, MOST_HOSTS
from engine.core.hosts.host_lease import LEAST_S, MOST_S

if TYPE_CHECKING:
    from engine.files.scenarios.scenario_file import Loaded

_PANEL = "Hosts to break"

BedHosts = Annotated[
    int,
    typer.Option(
        "--hosts",
        metavar="N",
        help="Run it on so many hosts of namespaces of this machine, which are broken and removed.",
        rich_help_panel=_PANEL,
    ),
]
BedLease = Annotated[
    int, typer.Option("--lease", metavar="SECONDS", help="Time to live of a host's lease.", rich_help_panel=_PANEL)
]


def problems_of_bed(hosts: int, lease_s: int, beside: Mapping[str, object]) -> list[Problem]:
    """Returns the mistakes in the options of hosts to break; `beside` are options that do not go with them."""
    if not hosts:
        return []
    found = []
    if not LEAST_HOSTS <= hosts <= MOST_HOSTS:
        hint = f"etcd has {MEMBERS} members, each on a host"
        found.append(Problem("--hosts", f"{LEAST_HOSTS} to {MOST_HOSTS}", str(hosts), hint))
    if not LEAST_S <= lease_s <= MOST_S:
        found.append(Problem("--lease", f"{LEAST_S} to {MOST_S} seconds", str(lease_s)))
    hint = "the hosts and their etcd are made for this run"
    asked = {name: value for name, value in beside.items() if value and value != os.environ.get("BAMBOO_ETCD")}
    return found + [Problem(name, "nothing beside --hosts", str(value), hint) for name, value in asked.items()]


def refuse_job_on_bed(hosts: int, lease_s: int, loaded: Loaded) -> None:
    """Raises UserError with the mistakes in the job of a scenario that is to run on so many hosts."""
    from engine.core.hosts.host_options import HostOptions, problems_of
    from engine.harness.bed.host_bed import NETWORK

    if not hosts:
        return
    address = NETWORK.partition("/")[0]
    given = HostOptions("bed", str(hosts), "h0", address, (address,), trusted=NETWORK, lease_s=lease_s)
    if problems := problems_of(given, loaded.scenario.job, lambda _: True):
        raise UserError(problems)
