"""The agent of one of several hosts, from its start to its end: it registers, coordinates or serves, may take over.

    every host      registers in the store, waits for the others, and compares everything that must be equal
    one of them     is elected: it runs the job as on one host, with the fork servers of all hosts
    the others      fork, relay, signal and report exits for it, until it announces the outcome
    its loss        one of the others is elected, waits for the rest, and continues the run from the store

Rules: the command is the same on all hosts, and so is the exit code. The outcome stays in the store for an hour, for an
agent that has lost its stream or is late.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from engine.codec.documents import resume
from engine.core.errors import BambooError, CoordinatorUnavailableError, ExitCode, StorageError, UserError, required
from engine.core.history.process_records import EndedRecord, RefusedRecord
from engine.core.hosts.ends import SILENT_NS, most_on_one
from engine.core.hosts.host_options import HostOptions, RegisteredHost
from engine.core.job.bit_fields import compared_facts
from engine.core.job.job import Job
from engine.core.job.update_rules import preloads
from engine.core.kv import KV, Lease
from engine.core.message_kinds import ToWorker
from engine.core.messages import WelcomeMessage
from engine.core.protocol.coordinator_state import COMMIT, FACTS, READERS, ROLE, STATE, CoordinatorState
from engine.core.protocol.succession import last_number, restarts_all, succession
from engine.files.accelerators import refuse_what_this_host_lacks
from engine.files.host_facts import host_facts, host_record
from engine.files.jobs.checkpoint_place import with_whole_place
from engine.files.jobs.user_files import code_files, data_files
from engine.files.run_folder import RunFolder
from engine.files.trajectory_file import own_sources
from engine.harness.screen import Screen
from engine.models.model_registry import unreadable_files
from engine.runtime.agent.host_registry import (
    ElectedHost,
    HostOutcome,
    HostRegistry,
    KeptLease,
    lease_s,
    network_of,
    new_certificate,
)
from engine.runtime.agent.host_servers import HostServers
from engine.runtime.agent.host_workers import HostWorkers
from engine.runtime.agent.remote_workers import RemoteSpawner
from engine.runtime.agent.requests import REQUEST, RequestFiles
from engine.runtime.agent.run_state import FailoverContext, InheritedProcess, InheritedRun
from engine.runtime.agent.scribe import Scribe
from engine.runtime.agent.scribe_work import scribe_for
from engine.runtime.agent.start_up import recording
from engine.runtime.agent.wire import WireClient, WireServer
from engine.runtime.process.clock import now_ns
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.interrupts import Interrupts, holding
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.recorder import Recorder
from engine.runtime.process.spawner import Spawner
from engine.runtime.store.etcd_settings import EtcdSettings

OF_COORDINATOR = (ROLE, STATE, COMMIT, FACTS, *READERS)  # keys in the store, and prefixes
# Runs the job with the servers of all hosts; returns the result of its case, None if this host has handed over.
RunOn = Callable[[Spawner, FailoverContext], Any]


@dataclass(frozen=True, slots=True)
class HostRunEnd:
    """The end of a run on this host; only the host that coordinated last has a `result`."""

    outcome: HostOutcome
    result: Any = None


@dataclass(frozen=True, slots=True)
class OwnHost:
    """This host in a run; `label` is the name of the case and the ID of the run."""

    job: Job
    label: str
    registry: HostRegistry
    lease: Lease
    kv: KV  # to revoke leases and to read the state
    screen: Screen
    run: RunOn
    give_back: Callable[[], None]  # the lease
    room: int = 0  # for workers on each host; 0: for any


_REVOKE_S = 2.0  # deadline of a call
_NOT_EQUAL = ("results", "name")  # fields of a job that may differ between hosts


def run_on_hosts(
    job: Job, name: str, options: HostOptions, patience_s: float, etcd: EtcdSettings, screen: Screen, run: RunOn
) -> HostRunEnd:
    """Runs this host's agent to the end of the run; if it coordinates, `run` runs the job. Raises BambooError."""
    from engine.runtime.store.etcd_kv import EtcdKV

    if problems := unreadable_files(job):
        raise UserError(problems)
    refuse_what_this_host_lacks(job, num_workers=most_on_one(job.num_workers + job.standby, options.number))
    root = f"/bamboo/{options.run_id}/"
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(holding())
        clients = (EtcdKV(etcd, root), EtcdKV(etcd, root), EtcdKV(etcd, root, _REVOKE_S))  # one for each kind of call
        kv, lease_kv, watch_kv = (stack.enter_context(contextlib.closing(client)) for client in clients)
        keeper = KeptLease(lease_kv, lease_s(lease_kv, options.lease_s), lease_kv.allow)
        stack.callback(back := partial(_give_back, keeper))
        lease, facts = keeper.lease, _facts(job, options)
        own = RegisteredHost(options.node, secrets.token_hex(8), options.address, lease.lease_id, facts, lease.ttl_s)
        registry = HostRegistry(kv, own, lease)
        if (outcome := registry.outcome()) is not None:
            hint = f"run {options.run_id} has ended before (choose another --run to train again)"
            return HostRunEnd(replace(outcome, words=f"{hint}: {outcome.words}"))
        registry.register()
        screen.say(f"host {own.name} has registered, and waits for {options.number - 1} more")
        if (run_of := registry.outlived()) is not None:
            screen.say(f"the run continues without host {own.name}, which was lost; its outcome is awaited")
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
        return serve(at, elected, server, interrupts)


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


def coordinate(
    run: RunOn, servers: HostServers, registry: HostRegistry, seat: FailoverContext, give_back: Callable[[], None]
) -> HostRunEnd:
    """Runs the job with the workers of all hosts, and announces the outcome; gives up the role if its workers left."""
    result, error = None, None
    try:
        result = run(servers, seat)
        if result is None:
            give_back()
            return HostRunEnd(left(registry.own.name))
        plain = result.to_plain()
        outcome = HostOutcome(int(plain["exit_code"]), str(plain["outcome"]))
    except BambooError as failure:
        error, outcome = failure, HostOutcome(int(failure.exit_code), f"failed: {failure}")
    except BaseException:
        tell(HostOutcome(ExitCode.INTERNAL, "failed: the agent that coordinated it has ended"), servers, registry)
        raise
    tell(outcome, servers, registry)
    if error is not None:
        raise error
    return HostRunEnd(outcome, result)


def left(name: str) -> HostOutcome:
    """Returns the outcome on a host whose workers have handed over."""
    return HostOutcome(ExitCode.OK, f"left: host {name} has handed over, and the run continues")


def tell(outcome: HostOutcome, servers: HostServers, registry: HostRegistry) -> None:
    """Announces the outcome to the store and to all hosts, uninterrupted by the signal that may have ended the run."""
    servers.stop_watching()

    def to_store() -> None:
        with contextlib.suppress(CoordinatorUnavailableError):  # then the hosts only learn it from their streams
            registry.tell(outcome)
            registry.forget(OF_COORDINATOR)

    telling = threading.Thread(target=to_store, name="outcome", daemon=True)
    telling.start()
    servers.tell(outcome.code, outcome.words)
    telling.join()


def place_of_host(address: str, port: int) -> str:
    """Returns the address where a host listens."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# A host serves the one that coordinates; when that one is lost, one of the others continues the run.
#
#     stream ends      if its port refuses, the process is gone and its lease is revoked; else its lease has to expire
#     election         the first host that asks wins; the others open streams to it, and report their processes
#     takeover         the winner waits for these, and runs the job from the state in the store, like its predecessor
#
# Rule: workers keep running meanwhile.

_STREAM_GONE_NS = 1_000_000_000  # of silence, after which the store is asked who coordinates
_ASK_EVERY_S = 0.1
_REFUSED_S = 0.2  # for an answer of the port


def serve(at: OwnHost, elected: ElectedHost, server: ForkServer, interrupts: Interrupts) -> HostRunEnd:
    """Serves the coordinating host with the workers of this host, until the outcome is known; may take over."""
    interrupts.let_wait()  # also during a takeover: a signal is a notice for its workers
    own, job, (name, run_id) = at.registry.own, at.job, at.label.rsplit("/", 1)
    host = replace(host_record(datetime.now()), node=own.name, run_id=run_id, lease_s=own.lease_s)
    with contextlib.ExitStack() as stack:
        scribe = stack.enter_context(scribe_for(is_in_process=False))
        folder = scribe.make_run_folder(job.results, f"{name}-{own.name.lower()}", at.screen.say)
        recorder, record_fds = recording(stack, folder.events, with_whole_place(job), True, host, scribe=scribe)
        board = ProgressBoard.create(job.num_workers)
        stack.callback(board.close)
        stack.enter_context(server.adopting(preloads(job)))
        workers = HostWorkers(server, recorder, record_fds, board, folder.logs, job)
        refuse = partial(_refuse_requests, RequestFiles(folder.path, REQUEST), recorder)
        stack.callback(workers.close)
        while True:
            with _stream(at, elected, workers) as wire:
                workers.run(interrupts, partial(_is_alone, wire), _ChiefWatch(wire, at.registry, elected), refuse)
                if (outcome := _end(at, workers)) is not None:
                    workers.end_workers()
                    recorder.write(EndedRecord(outcome=outcome.words.partition(":")[0], exit_code=outcome.code))
                    if wire.peer.ended_ns is None:
                        with contextlib.suppress(StorageError):
                            recorder.settle()  # records are shipped from the disk
                        workers.lines.finish()
                    return HostRunEnd(outcome)
            if (stands := _stand(at, elected, workers)) is not None:
                at.screen.say(f"host {elected.name}, which coordinated the run, is lost; this host takes over")
                chosen, wire_server = stands
                stack.callback(wire_server.close)
                stream = partial(_stream, at, chosen, workers)
                return take_over(at, chosen, elected, wire_server, workers, (folder, scribe), stream)
            with contextlib.suppress(CoordinatorUnavailableError):  # this host's lease limits the wait
                elected = at.registry.waited_for_elected() or elected


def _refuse_requests(requests: RequestFiles, recorder: Recorder, chief: str) -> None:
    """Refuses requests for faults in the folder of this host, which the coordinating one does not see."""
    if not recorder.look():
        return
    for request in requests.new():
        reason = f"host {chief} coordinates the run: inject there, into its folder"
        if requests.remove(request):
            recorder.write(RefusedRecord(request=request.name, reason=reason))


def _stand(at: OwnHost, before: ElectedHost, workers: HostWorkers) -> tuple[ElectedHost, WireServer] | None:
    """Tries to make this host the next coordinating one; one with a notice lets others go first."""
    with contextlib.suppress(CoordinatorUnavailableError):
        if workers.num_notices and at.registry.waited_for_elected() is not None:
            return None
        wire_server = WireServer(at.registry.own.address, before.made, at.screen.say)
        place = place_of_host(at.registry.own.address, wire_server.port)
        if (chosen := at.registry.succeed(before, place, workers.results.count)) is not None:
            return chosen, wire_server
        wire_server.close()
    return None


@contextlib.contextmanager
def _stream(at: OwnHost, elected: ElectedHost, workers: HostWorkers) -> Iterator[WireClient]:
    """Opens the stream of this host to the coordinating one; closing it does not block."""
    own = at.registry.own
    workers.leave()
    wire = WireClient(own.name, own.incarnation, elected.place, elected.made, workers.deliver, workers.wake)
    workers.follow(elected.name, wire.end, elected.heard, is_own=elected.incarnation == own.incarnation)
    try:
        yield wire
    finally:
        wire.end.close()
        closing = threading.Thread(target=wire.close, daemon=True)
        closing.start()
        if workers.outcome is not None or workers.has_left:
            closing.join()


def _end(at: OwnHost, workers: HostWorkers) -> HostOutcome | None:
    if workers.has_left:
        return left(at.registry.own.name)
    with contextlib.suppress(CoordinatorUnavailableError):
        return workers.outcome or at.registry.outcome()
    return None


def _is_alone(wire: WireClient) -> bool:
    return wire.peer.ended_ns is not None or wire.peer.silent_ns() >= _STREAM_GONE_NS


class _ChiefWatch:
    """Checks without a stream whether the coordinating host is gone, or the run is over."""

    def __init__(self, wire: WireClient, registry: HostRegistry, elected: ElectedHost):
        self._wire, self._registry, self._elected = wire, registry, elected
        self._asked_s = 0.0

    def __call__(self) -> bool:
        try:
            if self._wire.peer.ended_ns is not None and refuses(self._elected.place):
                if self._registry.outcome() is None:
                    self._registry.revoke(self._elected)
                return True
            if time.monotonic() - self._asked_s < _ASK_EVERY_S:
                return False
            self._asked_s = time.monotonic()
            chief = self._registry.elected()
            is_gone = chief is None or chief.incarnation != self._elected.incarnation
            return is_gone or self._registry.outcome() is not None
        except CoordinatorUnavailableError:
            return False  # this host's lease limits the wait


def refuses(place: str) -> bool:
    """Whether a host answers but no process listens at its address: the process there has ended."""
    address, _, port = place.rpartition(":")
    try:
        with socket.create_connection((address.strip("[]"), int(port)), _REFUSED_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


# A host that takes over a run from a lost one waits for the other hosts, and runs the job from the store.
#
#     others connect   each reports its processes, the decisions that this host lacks, and messages that are sent once
#     after a commit   the workers continue as the same processes
#     before one       they are ended, and all workers start again on the remaining hosts
#
# Rules: this host serves its own workers like remote ones, over a stream to itself, so there is one path. A host that
# does not connect is lost. Nothing that is needed is only on the disk of the lost host.

_COME_S = SILENT_NS / 1e9  # from the election until a host must have connected
_LOOK_S = 0.05
_END_S = 1.0  # from the outcome to the end of the thread that serves the workers of this host


def take_over(
    at: OwnHost,
    chosen: ElectedHost,
    before: ElectedHost,
    wire_server: WireServer,
    workers: HostWorkers,
    own_place: tuple[RunFolder, Scribe],
    stream: Callable[[], AbstractContextManager[object]],
) -> HostRunEnd:
    """Continues the run as the coordinating host, while a thread serves the workers of this host.

    `own_place` is this host's folder and scribe; `stream` opens its stream to itself.
    """
    away = {host.name: RemoteSpawner(host, takes_over=True) for host in at.registry.of_run(chosen)}
    own = away[chosen.name]
    network = network_of(before.made, at.registry.own.facts["transfers"])
    servers = HostServers(own, [*away.values()], at.kv, at.room, network)
    for name, spawner in away.items():
        wire_server.admit(name, spawner.peer)
    for name, spawner in away.items():
        if not spawner.registered.lease_id or name == before.name:
            servers.lose(name, "it coordinated the run, and has ended" if name == before.name else "its lease expired")
    with stream(), _served(workers):
        wait_for_words(away.values())
        for name, spawner in away.items():
            if not spawner.resent.is_set():
                servers.lose(name, f"it did not connect to host {chosen.name}, which coordinates now")
        try:
            inherited = _inherited(at, before, away, servers, workers, own_place[0].path)
        except BambooError as error:
            tell(HostOutcome(int(error.exit_code), f"failed: {error}"), servers, at.registry)
            raise
        seat = FailoverContext(at.lease, own_place[0], inherited, own_place[1])
        return coordinate(at.run, servers, at.registry, seat, at.give_back)


def wait_for_words(away: Collection[RemoteSpawner], patience_s: float = _COME_S) -> None:
    """Waits until each host has reported. Counts looks, not time, because a suspended process receives nothing."""
    looks = round(patience_s / _LOOK_S)
    while looks and (missing := [each for each in away if not each.resent.is_set()]):
        looks -= not missing[0].resent.wait(_LOOK_S)


@contextlib.contextmanager
def _served(workers: HostWorkers) -> Iterator[None]:
    """Serves the workers of this host in a thread, until that has received the outcome, or a little longer."""
    is_over = threading.Event()
    serving = threading.Thread(target=workers.run, args=(None, is_over.is_set, is_over.is_set), name="own", daemon=True)
    serving.start()
    try:
        yield
        serving.join(_END_S)
    finally:
        is_over.set()
        serving.join(_END_S)


def _stored_state(at: OwnHost) -> CoordinatorState | None:
    stored = {key: at.kv.get(key) for key in (STATE, FACTS)}
    texts = {key: item.value.decode() for key, item in stored.items() if item is not None}
    return resume(at.job, texts, 0) if texts.keys() == stored.keys() else None


def _inherited(
    at: OwnHost,
    before: ElectedHost,
    away: dict[str, RemoteSpawner],
    servers: HostServers,
    workers: HostWorkers,
    folder: Path,
) -> InheritedRun | None:
    """Returns the run to continue, or None if all workers start again; raises CoordinatorUnavailableError."""
    state, results = _stored_state(at), workers.results
    living = {name: spawner for name, spawner in away.items() if not spawner.peer.is_lost}
    workers.complete((spawner.past_decisions for spawner in living.values()), before.name)
    if restarts_all(state, has_results=bool(results.results.losses)):
        at.registry.forget(OF_COORDINATOR)
        servers.go_on_after(results)
        for host in away.values():
            host.end_held()
        return None
    processes = []
    by_host = {name: spawner.inherited for name, spawner in living.items()}
    heirs = succession(state, by_host, before.name, results.results.committed)
    for heir in heirs:
        server = away[heir.host]
        processes.append(InheritedProcess(heir.worker, heir.host, partial(server.adopt, heir)))
        for number, packet in server.words():
            if number == heir.number:
                results.hear_again(heir.worker, packet)
    servers.go_on_after(results)
    servers.dealt = {process.worker: process.host for process in processes}

    def hear_again() -> None:
        for spawner in away.values():
            spawner.hear_again()

    results.results.taken_over(now_ns())
    membership = required(state, "a run without a state is not taken over").membership
    welcomes, place = taught(away, {heir.host for heir in heirs if not heir.ended})
    home = home_of(next(iter(welcomes.values()), None), folder)
    return InheritedRun(
        home,
        results.results,
        processes,
        hear_again,
        results.faults,
        before.name,
        welcomes,
        place,
        last_number(membership, heirs),
        workers.num_notices,
    )


def taught(
    away: Mapping[str, RemoteSpawner], hosts: Collection[str]
) -> tuple[dict[int, WelcomeMessage], list[ToWorker]]:
    """Returns the messages that the workers of all hosts have received: their welcomes, the partition and the borders.

    Other hosts may know an earlier start, a host whose first worker has just arrived less; lost ones reported nothing.
    """
    messages = [away[name].past_orders for name in sorted(hosts)]
    welcomes = {one.worker: one for of_host in messages for one in of_host if isinstance(one, WelcomeMessage)}
    places = ([one for one in of_host if not isinstance(one, WelcomeMessage)] for of_host in messages)
    return welcomes, max(places, key=len, default=[])


def home_of(welcome: WelcomeMessage | None, folder: Path) -> Path:
    """Returns the folder in which the run began, whose name the checkpoints of all hosts have.

    `folder` is that of this host. The folder of the first host may be missing; then the job names another place.
    """
    if welcome is None:
        return folder
    inside = Path(welcome.checkpoints).parent
    return inside if inside.name == welcome.run else folder.with_name(welcome.run)
