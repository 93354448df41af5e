"""A host that serves the one that coordinates; when that one is lost, one of the others goes on with the run.

    stream ends      the process is gone if its port refuses: its lease is revoked. Else its lease has to expire
    election         the first host that asks; each other one opens a stream to it, and says which processes it has
    take-over        the winner waits for these, and runs the job from the state in the store, as the host before did

Rule: workers run on meanwhile.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial

from engine.core.config.update_rules import preloads
from engine.core.errors import CoordinatorUnavailableError, StorageError
from engine.core.history.process_records import EndedRecord
from engine.core.history.request_records import RefusedRecord
from engine.files.host_facts import host_record
from engine.files.jobs.checkpoint_place import with_whole_place
from engine.harness.hosts.coordinating import HostRunEnd, OwnHost, left, place_of_host
from engine.runtime.agent.start_up import recording
from engine.runtime.hosts.host_registry import Elected, HostOutcome, HostRegistry
from engine.runtime.hosts.host_workers import HostWorkers
from engine.runtime.hosts.wire import WireClient, WireServer
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.keeping.scribe_work import scribe_for
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.interrupts import Interrupts
from engine.runtime.requests.request_files import REQUEST, RequestFiles

_STREAM_GONE_NS = 1_000_000_000  # of silence: from then on the store is asked who coordinates
_ASK_EVERY_S = 0.1
_REFUSED_S = 0.2  # for an answer of the port


def serve(
    at: OwnHost, elected: Elected, server: ForkServer, interrupts: Interrupts, take_over: Callable[..., HostRunEnd]
) -> HostRunEnd:
    """Serves the host that coordinates with the workers of this host, until the outcome is known; may take over."""
    interrupts.let_wait()  # also while this host takes over: a signal is a notice for its workers
    own, job, (name, run_id) = at.registry.own, at.job, at.label.rsplit("/", 1)
    host = replace(host_record(datetime.now()), node=own.name, run_id=run_id)
    with contextlib.ExitStack() as stack:
        scribe = stack.enter_context(scribe_for(is_in_process=False))
        folder = scribe.make_run_folder(job.results, f"{name}-{own.name.lower()}", at.screen.say)
        recorder, record_fds = recording(stack, folder.events, with_whole_place(job), True, host, scribe=scribe)
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
                        with contextlib.suppress(StorageError):
                            recorder.settle()  # the last record is shipped from the disk
                        workers.lines.finish()
                    return HostRunEnd(found)
            if (stands := _stand(at, elected, workers)) is not None:
                workers.each_second = lambda chief: None
                at.screen.say(f"host {elected.name}, which coordinated the run, is lost; this host goes on with it")
                chosen, wire_server = stands
                stack.callback(wire_server.close)
                stream = partial(_stream, at, chosen, workers)
                return take_over(at, chosen, elected, wire_server, workers, (folder, scribe), stream)
            with contextlib.suppress(CoordinatorUnavailableError):  # the lease of this host says how long it may wait
                elected = at.registry.waited_for_elected() or elected


def _refuse_requests(requests: RequestFiles, recorder: Recorder, chief: str) -> None:
    """Refuses requests for faults in the folder of this host, which the one that coordinates does not see."""
    if not recorder.look():
        return
    for each in requests.new():
        reason = f"host {chief} coordinates the run: inject there, into its folder"
        recorder.write(RefusedRecord(request=each.name, reason=reason))
        requests.remove(each)


def _stand(at: OwnHost, before: Elected, workers: HostWorkers) -> tuple[Elected, WireServer] | None:
    """Tries to make this host the next one that coordinates; one with a notice lets others go first."""
    with contextlib.suppress(CoordinatorUnavailableError):
        if workers.num_notices and at.registry.waited_for_elected() is not None:
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
