"""A run on several hosts, as one of their agents: it registers, waits for the others, and coordinates or serves.

    every host      registers in the store, waits for the others, and compares everything that must be equal
    one of them     is elected: it runs the job as on one host, with the fork servers of all hosts
    the others      fork, relay, signal and report exits for it, until it announces the outcome

Rules: the command is the same on all hosts, and so is the exit code. The outcome stays in the store for an hour, for an
agent that has lost its stream or is late.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.core.errors import (
    CoordinatorUnavailableError,
    NothingMatchedError,
    UserError,
    required,
)
from engine.core.history.process_records import HostRecord
from engine.core.history.run_records import JobRecord
from engine.core.hosts.ends import most_on_one
from engine.core.hosts.host_options import HostOptions, RegisteredHost
from engine.core.job.bit_fields import compared_facts
from engine.core.job.job import Job
from engine.core.protocol.coordinator_state import STATE
from engine.files.accelerators import refuse_what_this_host_lacks
from engine.files.events_file import GrowingEvents
from engine.files.host_facts import host_facts
from engine.files.jobs.user_files import code_files, data_files
from engine.files.run_folder import RunFolder, find_run
from engine.files.trajectory_file import own_sources
from engine.harness.dead_runs import launcher_runs
from engine.harness.screen import Screen
from engine.harness.takeover import HostRunEnd, OwnHost, RunOn, coordinate, place_of_host, serve, take_over
from engine.models.model_registry import unreadable_files
from engine.runtime.agent.host_registry import (
    HostKeys,
    HostOutcome,
    HostRegistry,
    KeptLease,
    network_of,
    new_certificate,
)
from engine.runtime.agent.host_servers import HostServers
from engine.runtime.agent.remote_workers import RemoteSpawner
from engine.runtime.agent.run_state import FailoverContext
from engine.runtime.agent.wire import WireServer
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.interrupts import breakable, holding
from engine.runtime.store.etcd_settings import EtcdSettings

# The outcome of a run that was started elsewhere: of several hosts from their store, of any run from its folder.
#
# Rule: the folder of a host only has the records of that host. If the run may continue without it, only the store
# knows.

_POLL_S = 0.25
_CALL_S = 2.0
_START_S = 60.0  # the time that a launcher may take from its folder to its first event
_LEFT = "left"


def awaited_end(results: Path, run: str | None, etcd: EtcdSettings | None) -> tuple[str, HostOutcome]:
    """Waits for the end of a run; returns its name and its outcome. `run` is an id in the store, or names a folder.

    Raises:
        NothingMatchedError: neither the store nor the folder of results knows the run.
        CoordinatorUnavailableError: nothing is left that knows the outcome.
    """
    if run and etcd is not None and (outcome := _of_store(run, etcd)) is not None:
        return run, outcome
    try:
        folder = find_run(results, run)
    except NothingMatchedError as error:
        if etcd is None or not run:
            raise
        places = ", ".join(map(str, etcd.endpoints))
        raise NothingMatchedError(f"no run {run!r} of several hosts in the store at {places}, and {error}") from error
    run_id = _run_id(folder)
    if run_id and etcd is not None and (outcome := _of_store(run_id, etcd)) is not None:
        return run_id, outcome
    return folder.path.name, _of_folder(folder, run_id)


def _of_store(run_id: str, etcd: EtcdSettings) -> HostOutcome | None:
    from engine.runtime.store.etcd_kv import EtcdKV

    kv = EtcdKV(etcd, f"/bamboo/{run_id}/", deadline_s=_CALL_S)
    try:
        return HostKeys(kv).end()
    finally:
        kv.close()


def _run_id(folder: RunFolder) -> str:
    """Returns the name in the store of a run on several hosts; an empty string for one host."""
    host = GrowingEvents(folder.events, last_commits=True).read_on().first(HostRecord)
    return host.run_id if host is not None and host.node else ""


def _of_folder(folder: RunFolder, run_id: str) -> HostOutcome:
    events = GrowingEvents(folder.events, last_commits=True)
    while True:
        history = events.read_on()
        is_new = history.first(JobRecord) is None and time.time() - folder.path.stat().st_mtime < _START_S
        if history.ended is None and not is_new and not launcher_runs(history, folder.path):
            history = events.read_on()
            if history.ended is None:
                raise _unknown("the launcher is gone and did not record the end of the run", run_id)
        if history.ended is not None:
            if history.ended.outcome == _LEFT:
                raise _unknown("this host has left the run, which goes on without it", run_id)
            return HostOutcome(history.ended.exit_code, history.ended.outcome)
        with breakable():
            time.sleep(_POLL_S)


def _unknown(why: str, run_id: str) -> CoordinatorUnavailableError:
    hint = f"; its store may know more: bamboo status --wait {run_id} --etcd HOST:PORT" if run_id else ""
    return CoordinatorUnavailableError(why + hint)


_LEASE_CALL_S, _REVOKE_S = 0.7, 2.0  # deadlines of calls; each kind has its own client
_NOT_EQUAL = ("results", "name")  # fields of a job that may differ between hosts


def run_on_hosts(
    job: Job, name: str, options: HostOptions, patience_s: float, etcd: EtcdSettings, screen: Screen, run: RunOn
) -> HostRunEnd:
    """Runs the agent of this host to the end of the run; if it coordinates, `run` runs the job.

    Raises BambooError if the run could not be started.
    """
    from engine.runtime.store.etcd_kv import EtcdKV

    if problems := unreadable_files(job):
        raise UserError(problems)
    refuse_what_this_host_lacks(job, num_workers=most_on_one(job.num_workers + job.standby, options.number))
    root = f"/bamboo/{options.run_id}/"
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(holding())
        clients = (EtcdKV(etcd, root), EtcdKV(etcd, root, _LEASE_CALL_S), EtcdKV(etcd, root, _REVOKE_S))
        kv, lease_kv, watch_kv = (stack.enter_context(contextlib.closing(client)) for client in clients)
        keeper = KeptLease(lease_kv, options.lease_s)
        stack.callback(back := partial(_give_back, keeper))
        lease, facts = keeper.lease, _facts(job, options)
        own = RegisteredHost(options.node, secrets.token_hex(8), options.address, lease.lease_id, facts)
        registry = HostRegistry(kv, own, lease)
        if (outcome := registry.outcome()) is not None:
            hint = f"run {options.run_id} has ended before (choose another --run to train again)"
            return HostRunEnd(replace(outcome, words=f"{hint}: {outcome.words}"))
        registry.register()
        screen.say(f"host {own.name} has registered, and waits for {options.number - 1} more")
        if (run_of := registry.outlived()) is not None:
            screen.say(f"the run goes on without host {own.name}, which was lost; its outcome is awaited")
            return HostRunEnd(registry.awaited(run_of))
        hosts = registry.gathered(options.names, options.number, patience_s)
        server = stack.enter_context(_forking(keeper, own))
        elected = registry.elected()
        if elected is None:
            if kv.get(STATE) is not None:
                why = f"run {options.run_id} was begun before: {registry.holder()}, and is gone; choose another --run"
                raise CoordinatorUnavailableError(why)
            wire = WireServer(own.address, certificate := new_certificate(), screen.say)
            stack.callback(wire.close)
            if registry.elect(hosts, place_of_host(own.address, wire.port), certificate):
                away = [RemoteSpawner(host) for host in hosts if host.name != own.name]
                network = network_of(certificate, options.transfers)
                servers = HostServers(server, away, watch_kv, options.workers, network)
                for other in away:
                    wire.admit(other.host, other.peer)
                return coordinate(run, servers, registry, FailoverContext(lease), back)
            elected = required(registry.waited_for_elected(), "another host was elected")
        screen.say(f"host {elected.name} coordinates the run")
        at = OwnHost(job, f"{name}/{options.run_id}", registry, lease, watch_kv, screen, run, back, options.workers)
        return serve(at, elected, server, interrupts, take_over)


def _facts(job: Job, options: HostOptions) -> dict[str, Any]:
    """Returns the facts of this host, its job and its options on which all hosts of a run must agree."""
    fields = {name: value for name, value in asdict(job.masked).items() if name not in _NOT_EQUAL}
    files = {"code files": code_files(job), "data files": data_files(job)}
    compared = compared_facts(host_facts(Path.cwd()), job)
    own_options = {"--hosts": ",".join(sorted(options.names)) or options.hosts, "faults": options.faults}
    own_options["transfers"] = options.transfers
    return {**fields, **compared, "sources": own_sources(), **files, **own_options}


def _give_back(keeper: KeptLease) -> None:
    with contextlib.suppress(CoordinatorUnavailableError):
        keeper.close()


@contextlib.contextmanager
def _forking(keeper: KeptLease, own: RegisteredHost) -> Iterator[ForkServer]:
    """Starts the fork server of this host, whose processes end before the host's lease can expire."""
    with ForkServer(host=own.name, address=own.address) as server:

        def end_workers(why: str) -> None:
            server.kill_all()
            since = f"{keeper.unrenewed_s:.3f} s after the sending of the last renewal that was answered"
            os.write(2, f"bamboo: {why}; its workers were ended {since}\n".encode())

        keeper.cover(end_workers)
        yield server
