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
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.core.config.bit_fields import compared_facts
from engine.core.config.job import Job
from engine.core.config.update_rules import preloads
from engine.core.coordinator.state import STATE
from engine.core.errors import BambooError, CoordinatorUnavailableError, ExitCode, UserError, required
from engine.core.history.process_records import EndedRecord
from engine.core.hosts.deal import deal
from engine.core.hosts.host_options import HostOptions
from engine.core.hosts.registered_host import RegisteredHost
from engine.files.accelerators import refuse_what_this_host_lacks
from engine.files.host_facts import host_facts, host_record
from engine.files.jobs.checkpoint_place import with_whole_place
from engine.files.jobs.code_files import code_files
from engine.files.jobs.data_files import data_files
from engine.files.run_folder import create_run_folder
from engine.files.twin_file import own_sources
from engine.harness.screen import Screen
from engine.models.model_registry import unreadable_files
from engine.runtime.agent.start_up import recording
from engine.runtime.hosts.away_server import AwayServer
from engine.runtime.hosts.host_registry import Elected, HostOutcome, HostRegistry
from engine.runtime.hosts.host_servers import HostServers
from engine.runtime.hosts.host_workers import HostWorkers
from engine.runtime.hosts.kept_lease import KeptLease
from engine.runtime.hosts.run_certificate import new_certificate
from engine.runtime.hosts.wire import WireClient, WireServer
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.process.folder_lock import folder_used
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.interrupts import Interrupts, holding
from engine.runtime.store.etcd_settings import EtcdSettings

_STREAM_GONE_NS = 1_000_000_000  # from then on the store is asked for the outcome
_OUTCOME_WAIT_S = 10.0  # for the outcome of a run whose coordinator has gone
_MOST_TO_LEAVE_S = 86_400.0  # the coordinator ends workers after their grace
_LEASE_CALL_S, _REVOKE_S = 1.0, 2.0  # deadlines of calls: each kind has a client of its own
RunOn = Callable[[ForkServer], Any]  # runs the job with the servers of all hosts; returns the result of its case
_NOT_EQUAL = ("results", "name")  # fields of a job that may differ between hosts


@dataclass(frozen=True, slots=True)
class HostRunEnd:
    """The end of a run on this host; `result` is there on the host that coordinated."""

    outcome: HostOutcome
    result: Any = None


def run_on_hosts(
    job: Job, name: str, given: HostOptions, patience_s: float, etcd: EtcdSettings, screen: Screen, run: RunOn
) -> HostRunEnd:
    """Runs the agent of this host to the end of the run; where it coordinates, `run` makes it.

    Raises BambooError if the run could not be begun.
    """
    from engine.runtime.store.etcd_kv import EtcdKV

    if problems := unreadable_files(job):
        raise UserError(problems)
    refuse_what_this_host_lacks(job)
    root = f"/bamboo/{given.run_id}/"
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(holding())
        kv, lease_kv, watch_kv = EtcdKV(etcd, root), EtcdKV(etcd, root, _LEASE_CALL_S), EtcdKV(etcd, root, _REVOKE_S)
        for each in (kv, lease_kv, watch_kv):
            stack.callback(each.close)
        kept = KeptLease(lease_kv, given.lease_s)
        stack.callback(_give_back, kept)
        own = RegisteredHost(given.node, secrets.token_hex(8), given.address, kept.lease.lease_id, _facts(job))
        registry = HostRegistry(kv, own, kept.lease)
        if (outcome := registry.outcome()) is not None:
            return HostRunEnd(replace(outcome, words=f"run {given.run_id} has ended before: {outcome.words}"))
        registry.register()
        screen.say(f"host {own.name} has registered, and waits for {given.number - 1} more")
        if (run_of := registry.outlived()) is not None:
            screen.say(f"the run goes on without host {own.name}, which was lost; its outcome is awaited")
            return HostRunEnd(registry.awaited(run_of))
        hosts = registry.gathered(given.names, given.number, patience_s)
        server = stack.enter_context(_forking(kept, own, job))
        elected = registry.elected()
        if elected is None and kv.get(STATE) is not None:
            raise CoordinatorUnavailableError(f"run {given.run_id} was begun before, and its coordinator is gone")
        if elected is None:
            wire = WireServer(own.address, made := new_certificate())
            stack.callback(wire.close)
            if registry.elect(hosts, _place(own.address, wire.port), made):
                away = _admitted(wire, [each for each in hosts if each.name != own.name])
                servers = HostServers(
                    server, away, deal(range(job.num_workers), [each.name for each in hosts]), watch_kv
                )
                return _coordinate(run, servers, registry)
            elected = required(registry.waited_for_elected(), "another host was elected")
        screen.say(f"host {elected.name} coordinates the run")
        return _serve(job, f"{name}/{given.run_id}", elected, registry, server, interrupts)


def _facts(job: Job) -> dict[str, Any]:
    """Returns the facts of this host and of its job in which all hosts of a run have to agree."""
    fields = {name: value for name, value in asdict(job.masked).items() if name not in _NOT_EQUAL}
    files = {"code files": code_files(job), "data files": data_files(job)}
    return {**fields, **compared_facts(host_facts(Path.cwd()), job), "sources": own_sources(), **files}


def _place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _admitted(wire: WireServer, others: list[RegisteredHost]) -> list[AwayServer]:
    away = [AwayServer(each) for each in others]
    for each in away:
        wire.admit(each.host, each.peer)
    return away


def _give_back(kept: KeptLease) -> None:
    with contextlib.suppress(CoordinatorUnavailableError):
        kept.close()


@contextlib.contextmanager
def _forking(kept: KeptLease, own: RegisteredHost, job: Job) -> Iterator[ForkServer]:
    """Starts the fork server of this host, whose processes end before the lease of the host can expire."""
    with ForkServer() as server:
        server.host, server.address = own.name, own.address

        def end_workers(why: str) -> None:
            server.kill_all()
            os.write(2, f"bamboo: {why}; its workers were ended\n".encode())

        kept.end_workers = end_workers
        yield server


def _coordinate(run: RunOn, servers: HostServers, registry: HostRegistry) -> HostRunEnd:
    """Runs the job as on one host, with the workers of all hosts, and tells the outcome."""
    result, error = None, None
    try:
        result = run(servers)
        plain = result.to_plain()
        outcome = HostOutcome(int(plain["exit_code"]), str(plain["outcome"]))
    except BambooError as found:
        error, outcome = found, HostOutcome(int(found.exit_code), f"failed: {found}")
    except BaseException:
        _tell(HostOutcome(ExitCode.INTERNAL, "failed: the agent that coordinated it has ended"), servers, registry)
        raise
    _tell(outcome, servers, registry)
    if error is not None:
        raise error
    return HostRunEnd(outcome, result)


def _tell(outcome: HostOutcome, servers: HostServers, registry: HostRegistry) -> None:
    """Tells the outcome to the store and to all hosts; a signal, which may have ended the run, breaks neither off."""
    servers.stop_watching()

    def tell() -> None:
        with contextlib.suppress(CoordinatorUnavailableError):  # then the hosts hear it over their streams alone
            registry.tell(outcome)

    telling = threading.Thread(target=tell, name="outcome", daemon=True)
    telling.start()
    servers.tell(outcome.code, outcome.words)
    telling.join()


def _serve(
    job: Job, label: str, elected: Elected, registry: HostRegistry, server: ForkServer, interrupts: Interrupts
) -> HostRunEnd:
    """Serves the host that coordinates with the workers of this host, until the outcome is known."""
    interrupts.limit_s = interrupts.patience_s = _MOST_TO_LEAVE_S
    own, (name, run_id) = registry.own, label.rsplit("/", 1)
    folder = create_run_folder(Path(job.results), f"{name}-{own.name.lower()}", datetime.now(), secrets.token_hex(2))
    host = replace(host_record(datetime.now()), node=own.name, run_id=run_id)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder_used(folder.path))
        recorder, record_fds = recording(stack, folder.events, with_whole_place(job), False, host)
        board = ProgressBoard.create(job.num_workers)
        stack.callback(board.close)
        stack.enter_context(server.adopting(preloads(job)))
        workers = HostWorkers(server, recorder, record_fds, board, folder.logs, elected.name)
        stack.callback(workers.close)
        wire = WireClient(own.name, own.incarnation, elected.place, elected.made, workers.deliver)
        workers.end = wire.end
        stack.callback(wire.close)
        workers.run(interrupts, _is_gone(wire, registry, elected))
        workers.close()
        found = _served(own.name, elected.name, workers, registry)
        recorder.write(EndedRecord(outcome=found.words.partition(":")[0], exit_code=found.code))
    return HostRunEnd(found)


def _served(name: str, chief: str, workers: HostWorkers, registry: HostRegistry) -> HostOutcome:
    """Returns the end of the run as this host knows it, when its workers have ended."""
    if workers.has_left:
        return HostOutcome(ExitCode.OK, f"left: host {name} has handed over, and the run goes on")
    lost = f"failed: host {chief}, which coordinated the run, is lost; the workers of this host were ended"
    found = workers.outcome or registry.waited(registry.outcome, _OUTCOME_WAIT_S)
    return found or HostOutcome(ExitCode.COORDINATOR_UNAVAILABLE, lost)


def _is_gone(wire: WireClient, registry: HostRegistry, elected: Elected) -> Callable[[], bool]:
    """Returns whether the host that coordinates is gone, or the run is over: the store says so, if the stream ends."""

    def look() -> bool:
        if wire.peer.silent_ns() < _STREAM_GONE_NS:
            return False
        found = registry.elected()
        return found is None or found.incarnation != elected.incarnation or registry.outcome() is not None

    return look
