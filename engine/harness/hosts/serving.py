"""A host that serves the one that coordinates; when that one is lost, one of the others goes on with the run.

    stream ends      the process is gone if its port refuses: its lease is revoked. Else its lease has to expire
    election         the first host that asks; each other one opens a stream to it, and says which processes it has
    take-over        the winner waits for these, and runs the job from the state in the store, as the host before did

Rules: workers run on meanwhile. The winner serves its own workers as those of the others, over a stream to itself, so
there is one path. It has heard all of the run that it needs: nothing is on the disk of the lost host alone.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from engine.core.config.job import Job
from engine.core.config.update_rules import preloads
from engine.core.coordinator.state import FACTS, STATE
from engine.core.coordinator.succession import TakenProcess, succession
from engine.core.errors import BambooError, CoordinatorUnavailableError
from engine.core.history.process_records import EndedRecord
from engine.core.history.request_records import RefusedRecord
from engine.core.hosts.deal import deal
from engine.core.hosts.host_loss import SILENT_NS
from engine.core.store.kv import KV, Lease
from engine.files.host_facts import host_record
from engine.files.jobs.checkpoint_place import with_whole_place
from engine.files.run_folder import RunFolder, create_run_folder
from engine.harness.hosts.coordinating import HostRunEnd, RunOn, coordinate, left, place_of_host, tell
from engine.harness.screen import Screen
from engine.runtime.agent.start_up import recording
from engine.runtime.agent.taken_run import HeldProcess, Seat, TakenRun
from engine.runtime.hosts.away_server import AwayServer
from engine.runtime.hosts.host_registry import Elected, HostOutcome, HostRegistry
from engine.runtime.hosts.host_servers import HostServers
from engine.runtime.hosts.host_workers import HostWorkers
from engine.runtime.hosts.wire import WireClient, WireServer
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder, now_ns
from engine.runtime.process.folder_lock import folder_used
from engine.runtime.process.fork_client import Child, ForkServer
from engine.runtime.process.interrupts import Interrupts
from engine.runtime.requests.request_files import REQUEST, RequestFiles

_STREAM_GONE_NS = 1_000_000_000  # of silence: from then on the store is asked who coordinates
_ASK_EVERY_S = 0.1
_REFUSED_S = 0.2  # for an answer of the port
_MOST_TO_LEAVE_S = 86_400.0  # the coordinator ends workers after their grace
_COME_S = SILENT_NS / 1e9  # from the election until a host has to have come
_END_S = 1.0  # from the outcome until the thread has ended that serves the workers of this host


@dataclass(frozen=True, slots=True)
class OwnHost:
    """This host in a run; `label` is the name of the case and the id of the run."""

    job: Job
    label: str
    registry: HostRegistry
    lease: Lease
    kv: KV  # to revoke leases with, and to read the state
    screen: Screen
    run: RunOn
    give_back: Callable[[], None]  # the lease


def serve(at: OwnHost, elected: Elected, server: ForkServer, interrupts: Interrupts) -> HostRunEnd:
    """Serves the host that coordinates with the workers of this host, until the outcome is known; may take over."""
    patience = interrupts.limit_s, interrupts.patience_s
    interrupts.limit_s = interrupts.patience_s = _MOST_TO_LEAVE_S
    own, job, (name, run_id) = at.registry.own, at.job, at.label.rsplit("/", 1)
    folder = create_run_folder(Path(job.results), f"{name}-{own.name.lower()}", datetime.now(), secrets.token_hex(2))
    host = replace(host_record(datetime.now()), node=own.name, run_id=run_id)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder_used(folder.path))
        recorder, record_fds = recording(stack, folder.events, with_whole_place(job), True, host)
        board = ProgressBoard.create(job.num_workers)
        stack.callback(board.close)
        stack.enter_context(server.adopting(preloads(job)))
        workers = HostWorkers(server, recorder, record_fds, board, folder.logs, job)
        workers.each_second = partial(_refuse_requests, RequestFiles(folder.path, REQUEST), recorder)
        stack.callback(workers.close)
        while True:
            with _stream(at, elected, workers) as wire:
                workers.run(interrupts, partial(_is_alone, wire), _Look(wire, at.registry, elected))
                if (found := _end(at, workers)) is not None:
                    workers.end_workers()
                    recorder.write(EndedRecord(outcome=found.words.partition(":")[0], exit_code=found.code))
                    if wire.peer.ended_ns is None:
                        workers.lines.finish()
                    return HostRunEnd(found)
            if (stands := _stand(at, elected, workers)) is not None:
                interrupts.limit_s, interrupts.patience_s = patience
                workers.each_second = lambda chief: None
                at.screen.say(f"host {elected.name}, which coordinated the run, is lost; this host goes on with it")
                chosen, wire_server = stands
                stack.callback(wire_server.close)
                return _take_over(at, chosen, elected, wire_server, workers, folder)
            with contextlib.suppress(CoordinatorUnavailableError):  # the lease of this host says how long it may wait
                elected = at.registry.waited_for_elected() or elected


def _refuse_requests(requests: RequestFiles, recorder: Recorder, chief: str) -> None:
    """Refuses requests for faults in the folder of this host, which the one that coordinates does not see."""
    for each in requests.new():
        reason = f"host {chief} coordinates the run: inject there, into its folder"
        recorder.write(RefusedRecord(request=each.name, reason=reason))
        requests.remove(each)


def _stand(at: OwnHost, before: Elected, workers: HostWorkers) -> tuple[Elected, WireServer] | None:
    """Tries to make this host the next one that coordinates; one with a notice lets others go first."""
    with contextlib.suppress(CoordinatorUnavailableError):
        if workers.is_leaving and at.registry.waited_for_elected() is not None:
            return None
        wire_server = WireServer(at.registry.own.address, before.made, at.screen.say)
        place = place_of_host(at.registry.own.address, wire_server.port)
        if (chosen := at.registry.succeed(before, place, workers.heard.count)) is not None:
            return chosen, wire_server
        wire_server.close()
    return None


@contextlib.contextmanager
def _stream(at: OwnHost, elected: Elected, workers: HostWorkers) -> Iterator[WireClient]:
    """Opens the stream of this host to the one that coordinates; its end holds nothing up."""
    own = at.registry.own
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
    """Returns the end of the run as this host knows it; None if there is none."""
    if workers.has_left:
        return left(at.registry.own.name)
    with contextlib.suppress(CoordinatorUnavailableError):
        return workers.outcome or at.registry.outcome()
    return None


def _is_alone(wire: WireClient) -> bool:
    return wire.peer.ended_ns is not None or wire.peer.silent_ns() >= _STREAM_GONE_NS


class _Look:
    """Whether the host that coordinates is gone, or the run is over; asked while there is no stream."""

    def __init__(self, wire: WireClient, registry: HostRegistry, elected: Elected):
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
            found = self._registry.elected()
            return found is None or found.incarnation != self._elected.incarnation or self._is_over()
        except CoordinatorUnavailableError:
            return False  # the lease of this host says how long it may wait

    def _is_over(self) -> bool:
        return self._registry.outcome() is not None


def refuses(place: str) -> bool:
    """Whether no process listens at a place whose host answers: the process that did has ended."""
    address, _, port = place.rpartition(":")
    try:
        with socket.create_connection((address.strip("[]"), int(port)), _REFUSED_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _take_over(
    at: OwnHost, chosen: Elected, before: Elected, wire_server: WireServer, workers: HostWorkers, folder: RunFolder
) -> HostRunEnd:
    """Goes on with the run as the host that coordinates it; the workers of this host are served by a thread."""
    away = {each.name: AwayServer(each, takes_over=True) for each in at.registry.of_run(chosen)}
    own = away[chosen.name]
    servers = HostServers(own, [*away.values()], deal(range(at.job.num_workers), [*away]), at.kv)
    for name, each in away.items():
        wire_server.admit(name, each.peer)
    for name, each in away.items():
        if not each.known.lease_id or name == before.name:
            servers.lose(name, "it coordinated the run, and has ended" if name == before.name else "its lease is over")
    with _stream(at, chosen, workers), _served(workers):
        until_s = time.monotonic() + _COME_S
        for name, each in away.items():
            if not each.has_said.wait(max(0.0, until_s - time.monotonic())):
                servers.lose(name, f"it did not come to host {chosen.name}, which coordinates now")
        try:
            taken = _taken(at, before, away, servers, workers, folder)
        except BambooError as error:
            tell(HostOutcome(int(error.exit_code), f"failed: {error}"), servers, at.registry)
            raise
        return coordinate(at.run, servers, at.registry, Seat(at.lease, taken), at.give_back)


@contextlib.contextmanager
def _served(workers: HostWorkers) -> Iterator[None]:
    """Serves the workers of this host by a thread, until the outcome has come to it, or at most a little longer."""
    is_over = threading.Event()
    serving = threading.Thread(target=workers.run, args=(None, is_over.is_set, is_over.is_set), name="own", daemon=True)
    serving.start()
    try:
        yield
        serving.join(_END_S)
    finally:
        is_over.set()
        serving.join(_END_S)


def _taken(
    at: OwnHost,
    before: Elected,
    away: dict[str, AwayServer],
    servers: HostServers,
    workers: HostWorkers,
    folder: RunFolder,
) -> TakenRun:
    """Returns the run to go on with; raises CoordinatorUnavailableError for one that had not begun to train."""
    found = {key: at.kv.get(key) for key in (STATE, FACTS)}
    texts = {key: each.value.decode() for key, each in found.items() if each is not None}
    held = {name: each.held for name, each in away.items() if not each.peer.is_lost}
    results = workers.heard
    results.complete(each.told for each in away.values() if not each.peer.is_lost)
    processes = []
    for each in succession(texts, held, before.name, results.results.committed):
        server = away[each.host]
        processes.append(HeldProcess(each.worker, each.host, partial(_adopt, server, each)))
        for number, packet in server.words():
            if number == each.number:
                results.hear_again(each.worker, packet)
    servers.go_on_after(results)

    def hear_again() -> None:
        for server in away.values():
            server.hear_again()

    results.results.taken_over(now_ns())
    home = folder.path if at.job.checkpoints or not workers.checkpoints else Path(workers.checkpoints).parent
    return TakenRun(folder, home, results.results, processes, hear_again, results.faults, before.name)


def _adopt(server: AwayServer, taken: TakenProcess, far: int, board_fd: int) -> Child:
    return server.adopt(taken.number, taken.worker, taken.pid, taken.ended, far, board_fd)
