"""A run on several hosts, as one of their agents: it registers, waits for the others, and coordinates or serves.

    every host      registers in the store, waits for the others, compares all that has to be equal
    one of them     is elected: it runs the job as on one host, with the fork servers of all hosts
    the others      fork, relay, signal and see ends for it, until it tells the outcome

Rules: the line of the command is the same on all hosts, and so is the exit code. The outcome stays in the store for an
hour, for an agent that has lost its stream or comes late.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.core.config.bit_fields import compared_facts
from engine.core.config.job import Job
from engine.core.coordinator.state import STATE
from engine.core.errors import CoordinatorUnavailableError, UserError, required
from engine.core.hosts.deal import most_on_one
from engine.core.hosts.host_options import HostOptions
from engine.core.hosts.registered_host import RegisteredHost
from engine.core.store.kv import KV
from engine.files.accelerators import refuse_what_this_host_lacks
from engine.files.host_facts import host_facts
from engine.files.jobs.code_files import code_files
from engine.files.jobs.data_files import data_files
from engine.files.twin_file import own_sources
from engine.harness.hosts.coordinating import HostRunEnd, OwnHost, RunOn, coordinate, place_of_host
from engine.harness.hosts.serving import serve
from engine.harness.hosts.taking_over import take_over
from engine.harness.screen import Screen
from engine.models.model_registry import unreadable_files
from engine.runtime.agent.taken_run import Seat
from engine.runtime.hosts.away_server import AwayServer
from engine.runtime.hosts.host_registry import HostRegistry
from engine.runtime.hosts.host_servers import HostServers
from engine.runtime.hosts.kept_lease import KeptLease
from engine.runtime.hosts.run_certificate import network_of, new_certificate
from engine.runtime.hosts.wire import WireServer
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.interrupts import holding
from engine.runtime.store.etcd_settings import EtcdSettings

_LEASE_CALL_S, _REVOKE_S = 0.7, 2.0  # deadlines of calls: each kind has a client of its own
_NOT_EQUAL = ("results", "name")  # fields of a job that may differ between hosts


def run_on_hosts(
    job: Job, name: str, given: HostOptions, patience_s: float, etcd: EtcdSettings, screen: Screen, run: RunOn
) -> HostRunEnd:
    """Runs the agent of this host to the end of the run; where it coordinates, `run` makes it.

    Raises BambooError if the run could not be begun.
    """
    from engine.runtime.store.etcd_kv import EtcdKV

    if problems := unreadable_files(job):
        raise UserError(problems)
    refuse_what_this_host_lacks(job, num_workers=most_on_one(job.num_workers + job.standby, given.number))
    root = f"/bamboo/{given.run_id}/"
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(holding())
        kv, lease_kv, watch_kv = EtcdKV(etcd, root), EtcdKV(etcd, root, _LEASE_CALL_S), EtcdKV(etcd, root, _REVOKE_S)
        for each in (kv, lease_kv, watch_kv):
            stack.callback(each.close)
        kept = KeptLease(lease_kv, given.lease_s)
        stack.callback(_give_back, kept)
        own = RegisteredHost(given.node, secrets.token_hex(8), given.address, kept.lease.lease_id, _facts(job, given))
        registry = HostRegistry(kv, own, kept.lease)
        if (outcome := registry.outcome()) is not None:
            hint = f"run {given.run_id} has ended before (choose another --run to train again)"
            return HostRunEnd(replace(outcome, words=f"{hint}: {outcome.words}"))
        registry.register()
        screen.say(f"host {own.name} has registered, and waits for {given.number - 1} more")
        if (run_of := registry.outlived()) is not None:
            screen.say(f"the run goes on without host {own.name}, which was lost; its outcome is awaited")
            return HostRunEnd(registry.awaited(run_of))
        hosts = registry.gathered(given.names, given.number, patience_s)
        server = stack.enter_context(_forking(kept, own))
        elected = registry.elected()
        if elected is None:
            _refuse_begun(registry, given.run_id, kv)
            wire = WireServer(own.address, made := new_certificate(), screen.say)
            stack.callback(wire.close)
            if registry.elect(hosts, place_of_host(own.address, wire.port), made):
                away = [AwayServer(each) for each in hosts if each.name != own.name]
                servers = HostServers(server, away, watch_kv, given.workers, network_of(made, given.transfers))
                for other in away:
                    wire.admit(other.host, other.peer)
                return coordinate(run, servers, registry, Seat(kept.lease), partial(_give_back, kept))
            elected = required(registry.waited_for_elected(), "another host was elected")
        screen.say(f"host {elected.name} coordinates the run")
        back, label = partial(_give_back, kept), f"{name}/{given.run_id}"
        at = OwnHost(job, label, registry, kept.lease, watch_kv, screen, run, back, given.workers)
        return serve(at, elected, server, interrupts, take_over)


def _refuse_begun(registry: HostRegistry, run_id: str, kv: KV) -> None:
    """Raises CoordinatorUnavailableError for a run whose state is there, but no host that coordinates it."""
    if kv.get(STATE) is not None:
        why = f"run {run_id} was begun before: {registry.holder()}, and is gone; choose another --run"
        raise CoordinatorUnavailableError(why)


def _facts(job: Job, given: HostOptions) -> dict[str, Any]:
    """Returns the facts of this host, of its job and its options in which all hosts of a run have to agree."""
    fields = {name: value for name, value in asdict(job.masked).items() if name not in _NOT_EQUAL}
    files = {"code files": code_files(job), "data files": data_files(job)}
    compared = compared_facts(host_facts(Path.cwd()), job)
    given_here = {"--hosts": ",".join(sorted(given.names)) or given.hosts, "faults": given.faults}
    given_here["transfers"] = given.transfers
    return {**fields, **compared, "sources": own_sources(), **files, **given_here}


def _give_back(kept: KeptLease) -> None:
    with contextlib.suppress(CoordinatorUnavailableError):
        kept.close()


@contextlib.contextmanager
def _forking(kept: KeptLease, own: RegisteredHost) -> Iterator[ForkServer]:
    """Starts the fork server of this host, whose processes end before the lease of the host can expire."""
    with ForkServer() as server:
        server.host, server.address = own.name, own.address

        def end_workers(why: str) -> None:
            server.kill_all()
            since = f"{kept.unrenewed_s:.3f} s after the sending of the last renewal that was answered"
            os.write(2, f"bamboo: {why}; its workers were ended {since}\n".encode())

        kept.end_workers = end_workers
        yield server
